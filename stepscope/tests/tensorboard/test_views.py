"""The profiler tab in a browser without internet: what each view draws, and that no name runs as script."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect
from support import cuda_trace, recordings

from stepscope import tensorboard
from stepscope.tensorboard import pages

pytestmark = pytest.mark.browser

VIEWS = ["Overview", "Operator", "GPU Kernel", "Trace", "Distributed", "Memory", "Module", "Diff"]
HOSTILE = '<img src=x onerror="top.ran=1"><script>top.ran=1</script><a href="javascript:top.ran=1">'
PATIENCE = 120_000  # ms: the machine may have other work
STEPS = [f"ProfilerStep#{number}" for number in cuda_trace.NUMBERS]


class Tab:
    """The profiler tab in a page of a browser that is refused every address but those of this machine.

    Its `problems` are errors of the profiler's pages, and addresses elsewhere that were asked for.
    """

    def __init__(self, page):
        self.page, self.problems = page, []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note)
        self.page.route("**/*", self._decide)

    def _note(self, message):
        address = message.location["url"]  # neither TensorBoard's own, nor of Perfetto, which asks in vain for others
        if message.type == "error" and "/pytorch_profiler/" in address and "/perfetto/" not in address:
            self.problems.append(message.text)

    def _decide(self, route):
        if urlsplit(route.request.url).hostname in ("127.0.0.1", None):
            return route.continue_()
        self.problems.append(route.request.url)
        return route.abort()

    @property
    def frame(self):
        """The profiler's page."""
        return next(frame for frame in self.page.frames if "/pytorch_profiler/index.html" in frame.url)

    def show(self, run, view):
        if view == "Diff":
            self.compare(run, run)
            return
        self.frame.get_by_role("tab", name="Normal").click()
        self._choose(0, run)
        self._choose(1, view)

    def compare(self, baseline, experiment):
        self.frame.get_by_role("tab", name="Diff").click()
        for number, choice in enumerate([baseline, None, None, experiment, None, None]):
            self._choose(number, choice)

    def _choose(self, number, text):
        select = self.frame.locator(".MuiDrawer-root .MuiSelect-root").nth(number)
        if select.inner_text() == text:
            return
        select.click()
        options = self.frame.get_by_role("option")
        (options.get_by_text(text, exact=True) if text else options).first.click()
        self.frame.locator("[role=listbox]").wait_for(state="detached")  # while it fades, it catches the mouse

    @property
    def drawn(self):
        """The charts."""
        return self.frame.locator("main svg[role=img]")

    @property
    def viewer(self):
        """Perfetto's page, once it has the trace."""
        trace = self.page.frame_locator("iframe").frame_locator("main iframe").frame_locator("iframe")
        trace.locator("canvas").first.wait_for()
        viewer = next(frame for frame in self.page.frames if "/perfetto/" in frame.url)
        viewer.wait_for_function("() => window.ctx?.engine")
        return viewer

    def steps_in_trace(self):
        """Names of the bars of steps that Perfetto shows, asked by its own language."""
        return self.viewer.evaluate(
            """async () => {
                const rows = await ctx.engine.query("select name from slice where name glob 'ProfilerStep*'");
                const names = new Set();
                for (const row = rows.iter({ name: "str" }); row.valid(); row.next()) names.add(row.name);
                return [...names].sort();
            }"""
        )


def two_ranks(folder, change=lambda trace: trace):
    """Write the CUDA trace as two ranks have recorded it: it has something for every view."""
    folder.mkdir(parents=True)
    for rank in (0, 1):
        trace = cuda_trace.trace() | {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        (folder / f"host_{rank}.10.pt.trace.json").write_text(json.dumps(change(trace)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    two_ranks(root / "gpus")
    recordings.record(root / "stacks", 2, **recordings.EVERYTHING)
    recordings.record(root / "plain", 0)
    started = tensorboard.start(root)
    yield started
    started.stop()


@contextmanager
def open_tab(chromium, url):
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(PATIENCE)
    tab = Tab(context.new_page())
    tab.page.goto(url)
    tab.page.frame_locator("iframe").get_by_text("Average Step Time").wait_for()
    yield tab
    context.close()
    assert tab.problems == []  # in all that was shown


@pytest.fixture(scope="module")
def tab(chromium, server):
    with open_tab(chromium, server.link) as tab:
        yield tab


def test_the_overview_has_a_bar_with_its_number_for_each_category_of_each_step(tab):
    tab.show("gpus", "Overview")
    bars = tab.frame.locator("svg[role=img] rect:not([width='12'])")
    bars.first.wait_for()
    expect(bars).to_have_count(3 * len(cuda_trace.BREAKDOWN), timeout=PATIENCE)
    summary = tab.frame.locator("tr", has_text="Communication").inner_text()
    assert summary.split() == ["Communication", "50", "5"]
    bars.first.hover()
    tab.frame.get_by_text("Kernel: 480us").wait_for()


@pytest.mark.parametrize(
    ("run", "view", "cell", "shape", "label"),
    [
        ("gpus", "Operator", "aten::cudnn_convolution", "path", "aten::"),
        ("gpus", "GPU Kernel", cuda_trace.TRITON, "path", "triton"),
        ("gpus", "Distributed", "nccl:all_reduce", "rect", "host_1"),
        ("stacks", "Memory", "aten::mkldnn_convolution", "polyline", "Peak Memory Usage"),
        ("stacks", "Module", "Network_0", "rect", "ProfilerStep#"),  # of the longest step: a short one has no room
    ],
)
def test_a_view_has_its_table_and_its_charts(tab, run, view, cell, shape, label):
    tab.show(run, view)
    tab.frame.get_by_role("cell", name=cell).first.wait_for()
    tab.drawn.locator(shape).first.wait_for(state="attached")
    tab.drawn.get_by_text(label).first.wait_for()


def test_the_trace_view_has_the_steps_and_the_streams(tab):
    tab.show("gpus", "Trace")
    assert tab.steps_in_trace() == STEPS
    tab.viewer.get_by_text("stream 7").first.wait_for()


def test_the_diff_shows_operators_that_only_one_run_called(tab):
    tab.compare("stacks", "plain")
    tab.frame.get_by_role("columnheader", name="Exp Calls").click()  # the fewest first
    cells = tab.frame.locator("tr.ant-table-row").first.locator("td")
    expect(cells.nth(2)).to_have_text("0", timeout=PATIENCE)
    row = cells.all_inner_texts()
    assert (int(row[1]), row[2], row[4]) == (-int(row[3]), "0", "-100.00%")
    expect(tab.drawn.first.locator("polyline")).to_have_count(2, timeout=PATIENCE)


def test_dragging_over_the_memory_curve_zooms_and_a_right_click_resets(tab):
    tab.show("stacks", "Memory")
    tab.drawn.locator("polyline").first.wait_for()
    ticks = tab.drawn.locator("text[text-anchor=middle]")
    first = ticks.all_text_contents()
    area = tab.drawn.bounding_box()
    middle = area["y"] + area["height"] / 2
    tab.page.mouse.move(area["x"] + 300, middle)
    tab.page.mouse.down()
    tab.page.mouse.move(area["x"] + 400, middle)
    with tab.page.expect_response(lambda response: "start_ts" in response.url):
        tab.page.mouse.up()
    expect(ticks).not_to_have_text(first, timeout=PATIENCE)
    tab.page.mouse.click(area["x"] + 350, middle, button="right")
    expect(ticks).to_have_text(first, timeout=PATIENCE)


def test_the_page_follows_the_dark_mode_of_tensorboard(tab):
    for name, page in (("Dark", "html.dark"), ("Light", "html:not(.dark)")):
        tab.page.get_by_label("Menu for changing light or dark theme").click()
        tab.page.get_by_role("menuitem", name=name).click()
        tab.frame.locator(page).wait_for(state="attached")


def test_a_viewer_that_does_not_load_says_what_to_do(tab):
    tab.page.route("**/perfetto/index.html", lambda route: route.abort())
    tab.show("plain", "Trace")
    tab.page.frame_locator("iframe").frame_locator("main iframe").get_by_text("ui.perfetto.dev").wait_for()
    tab.page.unroute("**/perfetto/index.html")


@pytest.mark.slow
def test_the_views_work_in_a_frame_at_another_address_as_colab_shows_them(chromium, server, tmp_path, browser_program):
    """The page around is of another site. Where a browser blocks those, as in private windows, no TensorBoard works."""
    (tmp_path / "Default").mkdir()
    (tmp_path / "Default" / "Preferences").write_text('{"profile": {"cookie_controls_mode": 0}}')  # does not block
    context = chromium.browser_type.launch_persistent_context(
        tmp_path, executable_path=browser_program, args=["--no-sandbox"], viewport={"width": 1400, "height": 1000}
    )
    context.set_default_timeout(PATIENCE)
    tab = Tab(context.new_page())
    around, host, ours = "http://notebook.test/", "127.0.0.1:1", urlsplit(server.url).netloc
    frame = f'<iframe src="{server.link.replace(ours, host)}" width="100%" height="900"></iframe>'
    tab.page.route(around, lambda route: route.fulfill(body=frame, content_type="text/html"))
    at_server = lambda route: route.fetch(url=route.request.url.replace(host, ours))  # noqa: E731
    tab.page.route(f"http://{host}/**", lambda route: route.fulfill(response=at_server(route)))
    tab.page.goto(around)
    tab.page.frame_locator("iframe").frame_locator("iframe").get_by_text("Average Step Time").wait_for()
    tab.show("stacks", "Operator")
    tab.drawn.first.locator("path").first.wait_for(state="attached")
    tab.show("stacks", "Trace")
    tab.frame.frame_locator("main iframe").frame_locator("iframe").locator("canvas").first.wait_for()
    assert {urlsplit(frame.url).netloc for frame in tab.page.frames[1:]} == {host}
    assert tab.problems == []
    tab.page.unroute_all(behavior="ignoreErrors")  # what the page asks for while it closes
    context.close()


def hostile(content):
    """Return `content`, from a trace, with markup that would run as script in each of its texts."""
    kept = ("ph", "cat", "backend")  # they say what an event is
    if isinstance(content, dict):
        return {name: each if name in kept else hostile(each) for name, each in content.items()}
    if isinstance(content, list):
        return [hostile(each) for each in content]
    known = ("ProfilerStep#", "[memory]", "process_", "thread_", "cuda", "nccl:")
    if not isinstance(content, str) or content.startswith(known):
        return content
    if content.startswith(("enumerate(", "nn.Module: ", "nccl", "record_param_comms", "Optimizer.")):
        return content + HOSTILE
    return HOSTILE + content


@pytest.fixture(scope="module")
def hostile_tab(chromium, tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    two_ranks(root / "<img src=x onerror=top.ran=1>", hostile)
    for file in sorted((root / "<img src=x onerror=top.ran=1>").iterdir()):
        file.rename(file.with_name(f"<img src=x onerror=top.ran=1>{file.name}"))
    server = tensorboard.start(root)
    with open_tab(chromium, server.link) as tab:
        yield tab
    server.stop()


@pytest.mark.parametrize("view", VIEWS)
def test_names_are_shown_as_text_and_never_run(hostile_tab, view):
    tab = hostile_tab
    tab.show("<img src=x onerror=top.ran=1>", view)
    if view == "Trace":
        assert tab.steps_in_trace() == STEPS
        frame = tab.viewer
    else:
        frame = tab.frame
        tab.drawn.first.wait_for()
        for shape in tab.drawn.locator("rect, path").all()[:15]:
            shape.dispatch_event("mousemove")
        for row in frame.locator("main tr").all()[:5]:
            row.hover()
        for button in frame.locator("button:enabled", has_text="View CallStack").all()[:2]:
            button.click()
    shown = frame.get_by_text("<img src=x onerror=")
    shown.first.wait_for(state="attached")
    assert tab.page.evaluate("top.ran") is None
    expect(frame.locator("img[src=x]")).to_have_count(0, timeout=PATIENCE)
    assert tab.problems == []


slices = st.lists(
    st.builds(
        lambda tid, ts, dur, cat: {"ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "cat": cat, "name": "x"},
        st.sampled_from([0, 7]), st.integers(0, 30), st.integers(0, 10),
        st.sampled_from(["cpu_op", "python_function", "user_annotation"]),
    ),
    max_size=20,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(slices)
def test_events_in_each_row_of_the_trace_are_nested_or_disjoint(events):
    trace = json.loads(pages.rearrange(json.dumps({"traceEvents": events}).encode()))
    assert [each | {"tid": None} for each in trace["traceEvents"]] == [each | {"tid": None} for each in events]
    rows = defaultdict(list)
    for each in trace["traceEvents"]:
        rows[each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for row in rows.values():
        for start, end in row:
            assert not [other for other in row if start < other[0] < end < other[1]]


def test_a_trace_with_nan_reaches_the_viewer():
    assert b"NaN" in pages.rearrange(b'{"traceEvents": [], "value": NaN}')


def test_no_file_but_perfettos_own_is_served():
    status = []
    path = "/data/plugin/pytorch_profiler/perfetto/../__init__.py"
    pages.perfetto_route({"PATH_INFO": path}, lambda *answer: status.extend(answer))
    assert status[0].startswith("404")
