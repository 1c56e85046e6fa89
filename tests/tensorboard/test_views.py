"""The profiler tab in a browser without internet: what each view draws, light and dark; that no name runs as script."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect
from support import cuda_trace, recordings
from support.another_host import shown_elsewhere
from support.notebooks import NOTEBOOKS

from helpers import tensorboard
from helpers.results import tour
from helpers.tensorboard import perfetto

pytestmark = pytest.mark.browser

VIEWS = ["Overview", "Operator", "GPU Kernel", "Trace", "Distributed", "Memory", "Module", "Diff"]
HOSTILE = '<img src=x onerror="top.ran=1"><script>top.ran=1</script><a href="javascript:top.ran=1">'
PATIENCE = 120_000  # ms: the machine may have other work
STEPS = [f"ProfilerStep#{number}" for number in cuda_trace.NUMBERS]

UNTIL_NOTHING_FADES = """async () => {
    const fading = () => document.getAnimations().filter((each) => each.effect.getComputedTiming().endTime < Infinity);
    do {
        await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
        await Promise.allSettled(fading().map((each) => each.finished));
    } while (fading().length);
}"""
TEXTS_TOO_FAINT = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const fill = (element) => element.tagName === "g" && element.querySelector(":scope > rect");
    const background = (element) => {
        if (!element) return [255, 255, 255];
        const rect = fill(element);
        const colour = parts(rect ? getComputedStyle(rect).fill : getComputedStyle(element).backgroundColor);
        return colour[3] === 0 ? background(element.parentElement) : over(colour, background(element.parentElement));
    };
    const faint = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || element.closest("script, style, [disabled], .Mui-disabled")) continue;
        if (!element.checkVisibility()) continue;
        const style = getComputedStyle(element);
        const behind = background(element);
        const ink = over(parts(element.tagName === "text" ? style.fill : style.color), behind);
        const [low, high] = [luminance(ink), luminance(behind)].sort((a, b) => a - b);
        const ratio = (high + 0.05) / (low + 0.05);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (large ? 3 : 4.5)) faint.push(`${texts.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
    }
    return faint;
}"""


@dataclass
class Tab:
    """The profiler tab in a page of a browser that is refused every address but those of this machine."""

    page: object
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # addresses elsewhere

    def __post_init__(self):
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.route("**/*", self._decide)

    def _note(self, message):
        if message.type == "error" and "/pytorch_profiler/" in message.location["url"]:  # not TensorBoard's own
            self.errors.append(message.text)

    def _decide(self, route):
        if urlsplit(route.request.url).hostname in ("127.0.0.1", None):
            return route.continue_()
        self.asked.append(route.request.url)
        return route.abort()

    def open(self, url):
        self.page.goto(url)
        self.page.frame_locator("iframe").get_by_text("Average Step Time").wait_for()
        return self

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

    def bars(self, condition):
        """Names of the bars that Perfetto shows, asked by its own language."""
        return self.viewer.evaluate(
            """async (condition) => {
                const found = await ctx.engine.query(`select name from slice where ${condition}`);
                const names = [];
                for (const each = found.iter({ name: "str" }); each.valid(); each.next()) names.push(each.name);
                return names;
            }""",
            condition,
        )

    def steps_in_trace(self):
        return self.bars("name glob 'ProfilerStep*'")


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
    two_ranks(root / "rank-alone")
    (root / "rank-alone" / "host_1.10.pt.trace.json").unlink()
    recordings.record(root / "stacks", 2, **recordings.OPTIONS["everything"])
    recordings.record(root / "plain", 0)
    shutil.copytree(tour.FOLDER, root / "tour")
    started = tensorboard.start(root)
    yield started
    started.stop()


def open_tab(chromium, url, look="light"):
    context = chromium.new_context(viewport={"width": 1400, "height": 1000}, color_scheme=look)
    context.set_default_timeout(PATIENCE)
    return Tab(context.new_page()).open(url)


@pytest.fixture(scope="module", params=["light", pytest.param("dark", marks=pytest.mark.slow)])
def tab(request, chromium, server):
    opened = open_tab(chromium, server.link, request.param)
    opened.look = request.param
    yield opened
    opened.page.context.close()


@pytest.fixture(scope="module")
def light(chromium, server):
    opened = open_tab(chromium, server.link)
    yield opened
    opened.page.context.close()


# -------------------------------------------------------------------------------------------- the views, light and dark


def test_the_overview_has_a_bar_for_each_category_of_each_step(tab):
    tab.show("gpus", "Overview")
    bars = tab.frame.locator("svg[role=img] rect:not([width='12'])")
    bars.first.wait_for()
    expect(bars).to_have_count(3 * len(cuda_trace.BREAKDOWN), timeout=PATIENCE)
    summary = tab.frame.locator("tr", has_text="Communication").inner_text()
    assert summary.split() == ["Communication", "50", "5"]
    readable(tab)


def test_the_operator_view_has_the_operators(tab):
    tab.show("gpus", "Operator")
    tab.frame.get_by_role("cell", name="aten::cudnn_convolution", exact=True).wait_for()
    expect(tab.drawn).to_have_count(4, timeout=PATIENCE)
    tab.drawn.first.locator("path").nth(3).wait_for(state="attached")
    readable(tab)


def test_the_kernel_view_has_the_kernels(tab):
    tab.show("gpus", "GPU Kernel")
    tab.frame.get_by_role("cell", name=cuda_trace.TRITON, exact=True).first.wait_for()
    expect(tab.drawn.first.locator("path")).to_have_count(len(cuda_trace.KERNELS), timeout=PATIENCE)
    readable(tab)


def test_the_trace_view_has_the_steps_and_the_streams(tab):
    tab.show("gpus", "Trace")
    assert set(tab.steps_in_trace()) == set(STEPS)
    viewer = next(frame for frame in tab.page.frames if "/perfetto/" in frame.url)
    viewer.get_by_text("stream 7").first.wait_for()
    expect(viewer.locator(f".pf-theme-provider--{tab.look}")).to_have_count(1, timeout=PATIENCE)


def test_the_distributed_view_has_the_ranks(tab):
    tab.show("gpus", "Distributed")
    tab.drawn.nth(1).locator("rect").first.wait_for()
    expect(tab.drawn.nth(0).get_by_text("host_1")).to_have_count(1, timeout=PATIENCE)
    tab.frame.get_by_role("cell", name="nccl:all_reduce").first.wait_for()
    expect(tab.frame.get_by_text("Record all ranks into one folder")).to_have_count(0, timeout=PATIENCE)
    readable(tab)


def test_the_distributed_view_of_a_rank_alone_says_what_is_missing_and_what_to_do(tab):
    tab.show("rank-alone", "Distributed")
    tab.frame.get_by_text("This is the trace of one of 2 ranks").wait_for()
    tab.frame.get_by_text("Record all ranks into one folder").wait_for()
    expect(tab.drawn).to_have_count(2, timeout=PATIENCE)
    bars = "rect:not([width='12'])"  # without the legend's
    expect(tab.drawn.nth(0).locator(bars)).to_have_count(4, timeout=PATIENCE)
    expect(tab.drawn.nth(1).locator(bars)).to_have_count(0, timeout=PATIENCE)
    readable(tab)


def test_the_memory_view_has_the_curve_and_the_allocations(tab):
    tab.show("stacks", "Memory")
    tab.drawn.locator("polyline").first.wait_for()
    expect(tab.drawn.get_by_text("Peak Memory Usage")).to_have_count(1, timeout=PATIENCE)
    tab.frame.get_by_role("cell", name="aten::mkldnn_convolution").first.wait_for()
    readable(tab)


def test_the_module_view_has_the_modules(tab):
    tab.show("stacks", "Module")
    tab.frame.get_by_role("cell", name="Network_0").wait_for()
    tab.drawn.get_by_text("ProfilerStep#2").wait_for()
    readable(tab)


def test_the_diff_shows_what_one_run_called_and_the_other_did_not(tab):
    tab.compare("stacks", "plain")
    tab.frame.get_by_role("columnheader", name="Exp Calls").click()  # the fewest first
    cells = tab.frame.locator("tr.ant-table-row").first.locator("td")
    expect(cells.nth(2)).to_have_text("0", timeout=PATIENCE)
    row = cells.all_inner_texts()
    assert (int(row[1]), row[2], row[4]) == (-int(row[3]), "0", "-100.00%")
    expect(tab.drawn.first.locator("polyline")).to_have_count(2, timeout=PATIENCE)
    readable(tab)


def test_the_stock_plugin_gives_the_diff_two_lists_that_do_not_match(server, tmp_path):
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.diffrun import compare_op_tree

    files = [next((server.logdir / run).iterdir()) for run in ("stacks", "plain")]
    profiles = [RunProfileData.parse("worker", None, str(file), str(tmp_path)) for file in files]
    node = compare_op_tree(*(next(iter(profile.tid2tree.values())) for profile in profiles))
    baseline, experiment = ([operator.name for operator in side.aggregate_ops()] for side in (node.left, node.right))
    assert baseline != experiment  # and the page compares the first with the first, the second with the second


def test_no_view_fails_or_asks_for_anything_elsewhere(tab):
    """After all views were shown above, in the same page."""
    assert tab.errors == []
    assert tab.asked == []


def readable(tab):
    """All texts have the contrast that WCAG 2 asks for (AA)."""
    assert tab.frame.evaluate("document.documentElement.classList.contains('dark')") == (tab.look == "dark")
    tab.frame.evaluate(UNTIL_NOTHING_FADES)  # Ant Design fades colours in
    assert tab.frame.evaluate(TEXTS_TOO_FAINT) == []


# ------------------------------------------------------------------------------------------------------- what moves


def test_dragging_over_the_memory_curve_zooms_and_a_right_click_resets(light):
    light.show("stacks", "Memory")
    light.drawn.locator("polyline").first.wait_for()
    ticks = light.drawn.locator("text[text-anchor=middle]")
    first = ticks.all_text_contents()
    area = light.drawn.bounding_box()
    middle = area["y"] + area["height"] / 2
    light.page.mouse.move(area["x"] + 300, middle)
    light.page.mouse.down()
    light.page.mouse.move(area["x"] + 400, middle)
    with light.page.expect_response(lambda response: "start_ts" in response.url):
        light.page.mouse.up()
    expect(ticks).not_to_have_text(first, timeout=PATIENCE)
    light.page.mouse.click(area["x"] + 350, middle, button="right")
    expect(ticks).to_have_text(first, timeout=PATIENCE)


def test_a_bar_shows_its_number_under_the_mouse(light):
    light.show("gpus", "Overview")
    light.drawn.last.locator("rect").first.hover()
    light.frame.get_by_text("Kernel: 480us").wait_for()


def test_the_page_follows_tensorboards_choice_of_dark(light):
    light.page.get_by_label("Menu for changing light or dark theme").click()
    light.page.get_by_role("menuitem", name="Dark").click()
    light.frame.locator("html.dark").wait_for(state="attached")
    light.page.get_by_label("Menu for changing light or dark theme").click()
    light.page.get_by_role("menuitem", name="Light").click()
    light.frame.locator("html:not(.dark)").wait_for(state="attached")


def test_a_viewer_that_does_not_load_says_what_to_do(light):
    light.page.route("**/perfetto/index.html", lambda route: route.abort())
    light.show("plain", "Trace")
    frame = light.page.frame_locator("iframe").frame_locator("main iframe")
    frame.get_by_text("The trace viewer did not load.").wait_for()
    light.page.unroute("**/perfetto/index.html")


@pytest.mark.slow
def test_the_trace_view_works_through_the_hubs_proxy(chromium, server, hub, monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    tab = open_tab(chromium, hub + server.link)
    tab.show("stacks", "Trace")
    assert len(tab.steps_in_trace()) == 4
    assert (tab.errors, tab.asked) == ([], [])
    tab.page.context.close()


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
    with shown_elsewhere(urlsplit(server.url).port, "/#pytorch_profiler") as (around, host):
        tab.page.route(around, lambda route: route.continue_())
        tab.page.goto(around)
        tab.page.frame_locator("iframe").frame_locator("iframe").get_by_text("Average Step Time").wait_for()
        tab.show("stacks", "Operator")
        tab.drawn.first.locator("path").first.wait_for(state="attached")
        tab.show("stacks", "Trace")
        tab.frame.frame_locator("main iframe").frame_locator("iframe").locator("canvas").first.wait_for()
        assert {urlsplit(frame.url).netloc for frame in tab.page.frames[1:]} == {host}
        assert (tab.errors, tab.asked) == ([], [])
        context.close()


# ------------------------------------------------------------------------------- the guided tour, as notebook 01 has it

SEEN = """() => {
    const seen = ctx.timeline.visibleWindow;
    return [Number(seen.start.integral), seen.duration];
}"""
MARKED_IS_SEEN = """() => {
    const { ts, dur } = ctx.selection.selection;
    const [start, duration] = (SEEN)();
    return start <= Number(ts) && Number(ts + dur) <= start + duration;
}""".replace("SEEN", SEEN)


@pytest.fixture(scope="module")
def guided(light):
    light.show("tour", "Trace")
    light.viewer.get_by_text("main thread").wait_for()
    return light


def search(tab, text):
    """Search for a text in the Trace view, and return the name of the bar that is then marked."""
    field = tab.viewer.locator("input").first
    field.click()
    field.fill(text)
    tab.viewer.wait_for_function(
        "(text) => ctx.search.searchText === text && !ctx.search.searchInProgress && ctx.search.searchResults", arg=text
    )
    field.press("Enter")
    return marked(tab, text)


def marked(tab, text):
    tab.viewer.wait_for_function("(text) => ctx.selection.selection.name?.includes(text)", arg=text)
    return tab.viewer.evaluate("() => ctx.selection.selection.name")


def below(tab):
    """Names of the bars right below the one that is marked."""
    return tab.bars(f"parent_id = {tab.viewer.evaluate('() => ctx.selection.selection.eventId')}")


def test_the_tour_searches_for_what_is_in_the_trace(guided):
    (notebook,) = (path for path in NOTEBOOKS if path.stem.startswith("01"))
    sources = ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]
    (text,) = (source for source in sources if "1. **Move.**" in source)
    words = re.findall(r"(?:Search for|Type) `([^`]+)`", text)
    assert len(words) == 7
    for word in words:
        assert word in search(guided, word)


def test_after_a_click_the_keys_zoom_and_move_and_f_goes_back_to_what_is_marked(guided):
    search(guided, "ProfilerStep#6")
    guided.page.keyboard.press("q")  # the panel, which covers the white space
    area = guided.viewer.frame_element().bounding_box()
    guided.page.mouse.click(area["x"] + 0.7 * area["width"], area["y"] + 0.7 * area["height"])
    for key, change in (
        ("w", "now.duration < before[1]"),
        ("d", "Number(now.start.integral) > before[0]"),
        ("a", "Number(now.start.integral) < before[0]"),
        ("s", "now.duration > before[1]"),
    ):
        hold(guided, key, f"(before) => {{ const now = ctx.timeline.visibleWindow; return {change}; }}")
    search(guided, "ProfilerStep#6")
    hold(guided, "w", f"() => !({MARKED_IS_SEEN})()")
    guided.page.keyboard.press("f")
    guided.viewer.wait_for_function(MARKED_IS_SEEN)


def hold(tab, key, until):
    """Hold a key down until a condition holds, to which is given what was seen before."""
    before = tab.viewer.evaluate(SEEN)
    tab.page.keyboard.down(key)
    tab.viewer.wait_for_function(until, arg=before)
    tab.page.keyboard.up(key)


def test_the_tour_finds_the_parts_of_a_step_below_it(guided):
    search(guided, "ProfilerStep#6")
    parts = [name.partition("#")[0] for name in below(guided)]
    assert [name for name in parts if not name.startswith("aten::")] == ["enumerate(DataLoader)", "training"]
    search(guided, "evaluation")
    assert below(guided) == ["forward", "metric"]
    search(guided, "zero_grad")
    assert below(guided) == []
    search(guided, "Optimizer.step")
    assert len(below(guided)) > 8


def test_the_tour_finds_what_an_operator_was_given_and_its_counterpart_in_backward(guided):
    search(guided, "aten::conv2d")
    for text in ("Duration", "Input Dims"):
        guided.viewer.get_by_text(text, exact=True).wait_for()
    search(guided, "aten::convolution")
    guided.viewer.get_by_text("Following Flows").wait_for()
    guided.page.keyboard.press("]")
    assert marked(guided, "Backward") == "ConvolutionBackward0"
    guided.page.keyboard.press("[")
    assert marked(guided, "aten::") == "aten::convolution"


def test_the_tour_counts_the_items_of_a_metric(guided):
    search(guided, "metric")
    guided.page.keyboard.press("r")
    guided.viewer.get_by_text("Occurrences").wait_for()
    guided.viewer.get_by_text("Slices", exact=True).wait_for()
    row = guided.viewer.locator("tr", has_text="aten::item")
    expect(row).to_contain_text(str(tour.CLASSES**2), timeout=PATIENCE)


def test_the_help_of_the_trace_view_opens_and_closes_by_a_key(guided):
    guided.page.keyboard.press("?")
    guided.viewer.get_by_text("Perfetto Help").wait_for()
    guided.page.keyboard.press("Escape")
    guided.viewer.get_by_text("Perfetto Help").wait_for(state="detached")


# ------------------------------------------------------------------------------------------------------- hostile names


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
    tab = open_tab(chromium, server.link)
    yield tab
    tab.page.context.close()
    server.stop()


@pytest.mark.parametrize("view", VIEWS)
def test_names_are_shown_as_text_and_never_run(hostile_tab, view):
    tab = hostile_tab
    tab.show("<img src=x onerror=top.ran=1>", view)
    if view == "Trace":
        assert set(tab.steps_in_trace()) == set(STEPS)
        frame = next(frame for frame in tab.page.frames if "/perfetto/" in frame.url)
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
    assert tab.errors == []


# ------------------------------------------------------------------------------------------------------ rows of a trace


slices = st.lists(
    st.builds(
        lambda tid, ts, dur, cat: {"ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "cat": cat, "name": "x"},
        st.sampled_from([0, 7]), st.integers(0, 30), st.integers(0, 10),
        st.sampled_from(["cpu_op", "python_function", "user_annotation"]),
    ),
    max_size=20,
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(slices)
def test_in_each_row_of_the_trace_events_lie_in_one_another_or_apart(events):
    trace = json.loads(perfetto.rearrange(json.dumps({"traceEvents": events}).encode()))
    assert [each | {"tid": None} for each in trace["traceEvents"]] == [each | {"tid": None} for each in events]
    rows = defaultdict(list)
    for each in trace["traceEvents"]:
        rows[each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for row in rows.values():
        for start, end in row:
            assert not [other for other in row if start < other[0] < end < other[1]]


def test_a_trace_with_nan_reaches_the_viewer():
    assert b"NaN" in perfetto.rearrange(b'{"traceEvents": [], "value": NaN}')


def test_no_file_but_perfettos_own_is_served():
    status = []
    path = "/data/plugin/pytorch_profiler/perfetto/../__init__.py"
    perfetto.file_route({"PATH_INFO": path}, lambda *answer: status.extend(answer))
    assert status[0] == "404 Not Found"
