"""A reader's first minutes, in a real browser without internet: JupyterLab opens and runs 00, TensorBoard shows it."""

import shutil
import time
from urllib.parse import urlsplit

import pytest
from support.shared import jupyter

from helpers import config

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
PATIENCE = 300  # s: the machine may have other work

CODE_CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells
    .filter(cell => cell.cell_type === 'code')
    .map(cell => ({count: cell.execution_count, outputs: cell.outputs.map(output => output.output_type)}))"""


@pytest.fixture(scope="module")
def page(chromium):
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(1e3 * PATIENCE)
    return context.new_page()


@pytest.fixture(scope="module")
def refused(page):
    """Addresses outside this machine that a page asked for; all of them are refused."""
    addresses = []

    def decide(route):
        if urlsplit(route.request.url).hostname in ("127.0.0.1", "localhost"):
            return route.continue_()
        addresses.append(route.request.url)
        return route.abort()

    page.context.route("**/*", decide)
    return addresses


@pytest.fixture(scope="module")
def lab(drawn_images, tmp_path_factory):
    """JupyterLab as `make lab` starts it, over a copy of the notebooks and with nobody's own settings."""
    folder = tmp_path_factory.mktemp("lab")
    ignored = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    shutil.copytree(config.PROJECT / "notebooks", folder / "notebooks", ignore=ignored)
    options = ["--LabApp.default_url=/lab/tree/notebooks/00-start-here.ipynb", "--expose-app-in-browser"]
    with jupyter(folder, "jupyterlab", *options, **drawn_images) as address:
        yield address


@pytest.fixture(scope="module")
def opened(page, refused, lab):
    """The notebook 00 in JupyterLab, after `Run All Cells` has come to its end."""
    page.goto(lab)
    page.locator(".jp-Notebook").wait_for()
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    cells = []

    def done():
        cells[:] = page.evaluate(CODE_CELLS)
        return all(cell["count"] for cell in cells) or any("error" in cell["outputs"] for cell in cells)

    wait_for(done, lambda: f"not all cells were executed: {cells}")
    return page


def test_jupyterlab_runs_the_first_notebook_to_the_end_and_each_figure_has_an_alternative_text(opened):
    path = opened.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    assert path == "notebooks/00-start-here.ipynb"
    cells = opened.evaluate(CODE_CELLS)
    assert len(cells) > 10 and [cell for cell in cells if "error" in cell["outputs"]] == []
    pictures = opened.evaluate("() => [...document.querySelectorAll('.jp-OutputArea img')].map(image => image.alt)")
    assert pictures and all(len(text) > 20 for text in pictures)


def test_the_profiler_tab_lists_the_run_and_draws_its_numbers(opened, refused):
    opened.locator("iframe[title=TensorBoard]").scroll_into_view_if_needed()
    texts = []

    def shown():
        texts[:] = [frame.locator("body").inner_text() for frame in opened.frames if "pytorch_profiler" in frame.url]
        return any("hello" in text and "Average Step Time" in text for text in texts)

    wait_for(shown, lambda: f"TensorBoard shows {texts}")
    assert [address for address in refused if "127.0.0.1" not in address] == []


def wait_for(condition, explain):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)
