"""The built site: its pages, what is folded and left out, links, and how it shows in a browser."""

import importlib
import inspect
import re

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbformat import v4

from helpers import config
from helpers.lessons import execute, site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

GRAVE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter((fault) => ["serious", "critical"].includes(fault.impact))
    .flatMap((fault) => fault.nodes.map((node) => `${fault.id}: ${node.html.slice(0, 200)}`))"""


@pytest.fixture(scope="module")
def built_site(tmp_path_factory):
    """Folder of the site of the whole course, with outputs of one notebook more."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_PRESET", "ci")
        patch.setenv("COURSE_RUNS", str(folder / "runs"))
        cells = [
            v4.new_markdown_cell("# 18 · Everything\n\nSee the [recipes](recipes.py) and the [README](../README.md)."),
            v4.new_code_cell(f"print({str(config.runs_dir() / 'everything')!r})"),
            v4.new_code_cell("1 + 2", metadata={"tags": ["solution"]}),
        ]
        everything = folder / "18-everything.ipynb"
        nbformat.write(v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), everything)
        execute.run([everything], "drawn images")
        (config.PROJECT / "notebooks" / ".ipynb_checkpoints").mkdir(exist_ok=True)  # as JupyterLab leaves it
        site.build(folder / "site", [*execute.all_notebooks(), everything])
    return folder / "site"


def page(folder, name):
    return (folder / f"{name}.html").read_text(encoding="utf-8")


def test_every_notebook_document_and_room_of_the_tool_has_a_page_in_the_table_of_contents(built_site):
    home = page(built_site, "index")
    names = ["notebooks/glossary", "notebooks/checklist", "CHANGELOG", "data/reference/tour/README", "stepscope/README"]
    names += [f"stepscope/docs/{path.stem}" for path in config.PROJECT.glob("stepscope/docs/*.md")]
    for name in [*names, "api", *(f"notebooks/{path.stem}" for path in execute.all_notebooks())]:
        assert (built_site / f"{name}.html").exists() and f'href="{name}.html"' in home, name


def test_outputs_are_shown_with_what_they_were_measured_on_and_solutions_are_folded(built_site):
    text = page(built_site, "notebooks/18-everything")
    assert "Measured on 20" in text and "drawn images" in text and "<details" in text
    assert str(built_site.parent) not in text and "runs/everything" in text
    assert "was not executed" in page(built_site, "notebooks/02-two-clocks")
    first = execute.all_notebooks()[0]
    solutions = sum("solution" in cell.metadata.get("tags", ()) for cell in nbformat.read(first, 4).cells)
    assert len(re.findall(r'<details class="[^"]*hide', page(built_site, f"notebooks/{first.stem}"))) == solutions > 0


def test_a_page_of_a_room_has_all_that_the_room_offers_once(built_site):
    for name in ("stepscope.timing", "stepscope.traces", "stepscope.diagnosis"):
        text = page(built_site, f"api/{name}")
        for offered in importlib.import_module(name).__all__:
            public = getattr(importlib.import_module(name), offered)
            assert not inspect.isroutine(public) or text.count(f'id="{name}.{offered}"') == 1, offered


def test_a_link_to_a_file_without_a_page_downloads_it(built_site):
    for name, linked in (("README", "LICENSE"), ("notebooks/18-everything", "recipes.py")):
        (link,) = re.findall(rf'href="(?:\.\./)?(_downloads/\w+/{linked})"', page(built_site, name))
        assert (built_site / link).exists()


@pytest.mark.slow
def test_a_link_to_nothing_is_an_error_and_leaves_the_earlier_site(tmp_path):
    out, broken = tmp_path / "site", tmp_path / "99-broken.ipynb"
    out.mkdir()
    (out / site.MADE_BY_SPHINX).touch()
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# 99\n\n[nowhere](nothing.md)")]), broken)
    with pytest.raises(config.CourseError, match=r"nothing\.md"):
        site.build(out, [broken])
    assert [path.name for path in out.iterdir()] == [site.MADE_BY_SPHINX]


def test_a_folder_that_is_no_site_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(config.CourseError):
        site.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_outputs_are_kept_until_the_code_or_the_preset_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path)
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COURSE_PRESET", "ci")
    path = tmp_path / "00-a.ipynb"

    def write(text, code):
        nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell(text), v4.new_code_cell(code)]), path)

    write("# A", "print('ran')")
    site.refresh("drawn images")
    write("# Another title", "print('ran')")
    assert [site.kept(path).cells[0].source, site.kept(path).cells[1].outputs[0].text] == ["# Another title", "ran\n"]
    monkeypatch.setenv("COURSE_PRESET", "full")
    assert site.kept(path) is None
    monkeypatch.setenv("COURSE_PRESET", "ci")
    write("# A", "print('r' + 'an')")
    assert site.kept(path) is None


@pytest.mark.browser
def test_pages_can_be_read_by_all_on_a_phone_in_light_and_dark_and_ask_for_nothing_elsewhere(built_site, chromium):
    faults, requests = [], []
    for scheme in ("light", "dark"):
        context = chromium.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
        context.set_default_timeout(120_000)
        context.on("request", lambda request: requests.append(request.url))
        for name in ("index", "notebooks/glossary", "api/stepscope.diagnosis", "notebooks/18-everything"):
            tab = context.new_page()
            tab.goto((built_site / f"{name}.html").as_uri())
            tab.evaluate(Axe().axe_script)
            faults += [f"{name}: {fault}" for fault in tab.evaluate(GRAVE)]
            if tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                faults.append(f"{name} scrolls sideways")
            tab.close()
        context.close()
    assert faults == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
