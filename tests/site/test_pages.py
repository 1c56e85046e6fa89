"""The built site: what its pages show, that nothing of them comes from elsewhere, and when notebooks are executed."""

import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbformat import v4

from helpers import config
from helpers.lessons import execute, site
from helpers.lessons.site import links, outputs, tab

pytestmark = pytest.mark.processes

LOADED = {"script": "src", "link": "href", "img": "src", "source": "src", "iframe": "src", "object": "data"}


class Page(HTMLParser):
    """A page's elements that lead or belong elsewhere, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.path, self.loads, self.links, self.pictures, self.anchors = path, [], [], [], set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag in LOADED and found.get(LOADED[tag]) and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found[LOADED[tag]])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img":
            self.pictures.append(found)


@pytest.fixture(scope="module")
def pages(built_site):
    paths = sorted(built_site.rglob("*.html"))
    return {path.relative_to(built_site).as_posix(): Page(path) for path in paths if "_static" not in path.parts}


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COURSE_PRESET", "ci")


def cell_with(page, words):
    """The HTML of the cell of a notebook with these words in it."""
    return next(cell for cell in page.text.split('<div class="cell ') if words in re.sub("<[^>]*>", "", cell))


# ---------------------------------------------------------------------------------------------------- what is there


def test_nothing_is_left_beside_the_site(built_site):
    assert not list(built_site.parent.glob("jupyter*"))


def test_every_notebook_and_every_document_has_its_page(pages):
    names = [path.with_suffix(".html").name for path in execute.all_notebooks()]
    assert names and not {f"notebooks/{name}" for name in names} - pages.keys()
    for name in ("index", "glossary", "search", "api/index", "notebooks/README", "notebooks/checklist", "CHANGELOG"):
        assert f"{name}.html" in pages
    for name in ("notebooks/recipes", "notebooks/train_ddp", "notebooks/slurm/one_node", "data/reference/tour/README"):
        assert f"{name}.html" in pages


def test_the_table_of_contents_has_the_parts_of_the_ladder(pages):
    captions = re.findall(r'class="caption-text">([^<]*)', pages["index.html"].text)
    assert captions[:4] == ["Part 1: feed it", "Part 2: compute", "Part 3: beyond one machine", "Part 4: yours"]


def test_a_page_says_on_which_machine_when_and_with_what_it_was_measured(pages):
    top = pages["notebooks/00-start-here.html"].text.partition('<section id="predict">')[0]
    assert "Measured on 20" in top and "drawn images" in top and "Preset: ci" in top
    assert f"PyTorch {execute.recording.machine()['torch']}" in top


def test_a_page_without_outputs_says_so(pages):
    assert "was not executed" in pages["notebooks/02-two-clocks.html"].text
    assert "was not executed" not in pages["notebooks/00-start-here.html"].text


def test_the_ladder_is_on_the_page_of_each_reference_that_has_one(pages):
    for ladder in (config.PROJECT / "data" / "reference").glob("*/ladder.png"):
        (picture,) = pages[f"data/reference/{ladder.parent.name}/README.html"].pictures
        assert picture["alt"].startswith("Bars of images per second")


# --------------------------------------------------------------------------------------------------- how outputs show


def test_every_picture_has_an_alternative_text(pages):
    pictures = [(name, picture) for name, page in pages.items() for picture in page.pictures]
    assert len(pictures) > 5
    assert [(name, picture["src"]) for name, picture in pictures if len(picture.get("alt") or "") < 20] == []


def test_a_figure_is_a_file_with_the_text_of_the_notebook(pages, built_site):
    everything = pages["notebooks/99-everything.html"]
    (figure,) = [each for each in everything.pictures if each["alt"] == "A bar for each of three loaders"]
    assert (everything.path.parent / figure["src"]).read_bytes().startswith(b"\x89PNG")
    assert "base64" not in pages["notebooks/00-start-here.html"].text


def test_progress_bars_are_gone_and_what_was_printed_beside_them_is_there(pages):
    assert [name for name, page in pages.items() if "\r" in page.text or re.search(r"\d+%\|", page.text)] == []
    assert "traces are in ./runs/everything" in pages["notebooks/99-everything.html"].text
    assert "decoded, float, normalized against decoded" in pages["notebooks/00-start-here.html"].text


@pytest.mark.parametrize("name", ["00-start-here", "99-everything"])
def test_the_tensorboard_that_has_ended_is_a_picture_and_a_link(pages, name):
    page = pages[f"notebooks/{name}.html"]
    assert "TensorBoard opens here when you run the notebook" in page.text
    assert "01-first-profile.html#read-the-trace-in-tensorboard" in page.links
    has_browser = any(map(shutil.which, tab.BROWSERS))
    assert [each["alt"] for each in page.pictures if "TensorBoard" in each["alt"]] == [tab.ALT] * has_browser


def test_source_that_a_cell_shows_has_the_colours_of_the_page(pages):
    cell = cell_with(pages["notebooks/99-everything.html"], "source_of")
    assert "<style" not in cell and '<div class="highlight"><pre><span class="nb">echo</span> /tmp' in cell


def test_a_table_has_the_look_of_the_page(pages):
    cell = cell_with(pages["notebooks/99-everything.html"], "table")
    assert '<table class="dataframe"><tr><td>7' in cell and "border=" not in cell
    assert '<table class="dataframe">' in cell_with(pages["notebooks/00-start-here.html"], "preflight.check()")


def test_solutions_are_folded_with_their_outputs(pages):
    for path in execute.all_notebooks():
        solutions = sum("solution" in cell.metadata.get("tags", ()) for cell in nbformat.read(path, 4).cells)
        folded = re.findall(
            r'<details class="[^"]*hide[^"]*">\s*<summary[^>]*>', pages[f"notebooks/{path.stem}.html"].text
        )
        assert len(folded) == solutions > 0
    cell = cell_with(pages["notebooks/99-everything.html"], "1 + 2")
    assert cell.index("<details") < cell.index(">3") < cell.index("</details>")


def test_the_sentence_beside_a_solution_is_about_this_page(pages):
    assert [name for name, page in pages.items() if "three dots" in page.text] == []
    assert "Solution in the next cell, collapsed: click to open." in pages["notebooks/00-start-here.html"].text


# --------------------------------------------------------------------------------- nothing from elsewhere, nothing dead


def test_a_page_loads_nothing_from_elsewhere(pages, built_site):
    outside = re.compile(r"^(\w+:)?//")
    assert [(name, each) for name, page in pages.items() for each in page.loads if outside.match(each)] == []
    assert [name for name, page in pages.items() if "<iframe" in page.text] == []
    for style in built_site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style.read_text(encoding="utf-8"))
        assert [each for each in addresses if outside.match(each)] == [], style


def test_no_link_leads_to_nothing(pages, built_site):
    dead = []
    for name, page in pages.items():
        for link in {*page.links, *page.loads}:
            target, _, anchor = link.partition("#")
            if re.match(r"(\w+:|//)", link):
                continue
            path = (page.path.parent / unquote(target.partition("?")[0])).resolve() if target else page.path
            other = path.relative_to(built_site.resolve()).as_posix() if path.is_file() else None
            if other is None or (anchor and other in pages and unquote(anchor) not in pages[other].anchors):
                dead.append(f"{name}: {link}")
    assert dead == []


def test_no_path_of_this_machine_is_on_a_page(pages, built_site):
    own = {str(config.PROJECT), str(Path.home()), str(built_site.parent), str(Path(os.__file__).parent)} - {"/"}
    found = [(name, path) for name, page in pages.items() for path in own if f"{path}/" in page.text]
    assert found == []


# -------------------------------------------------------------------------------------------------------- the build


def a_page(folder, text):
    folder.mkdir()
    (folder / "index.md").write_text(f"# A page\n\n{text}\n")
    (folder.parent / "built").mkdir()
    return folder, folder.parent / "built"


def test_a_warning_is_an_error_that_names_the_page(tmp_path):
    with pytest.raises(site.SiteFailed, match=r"\nindex\.md:3: WARNING.*nothing\.md"):
        site.render(*a_page(tmp_path / "source", "[nowhere](nothing.md)"))


@pytest.mark.parametrize(("address", "buttons"), [("", 0), ("https://github.com/ada/course", 1)])
def test_buttons_lead_to_the_repository_if_it_has_an_address(tmp_path, monkeypatch, address, buttons):
    monkeypatch.setattr(config, "REPOSITORY", address)
    source, built = a_page(tmp_path / "source", "```{toctree}\nnotebooks/00-a\n```")
    (source / "notebooks").mkdir()
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# A")]), source / "notebooks" / "00-a.ipynb")
    site.render(source, built)
    page = (built / "notebooks" / "00-a.html").read_text()
    assert (
        page.count('href="https://colab.research.google.com/github/ada/course/blob/colab/notebooks/00-a.ipynb"')
        == buttons
    )
    assert ("github" in page) == bool(buttons)


def test_a_folder_that_is_no_site_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(site.NoSite, match="expected nothing or an earlier site"):
        site.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_failed_build_leaves_the_earlier_site(tmp_path):
    out = tmp_path / "site"
    out.mkdir()
    for name in (site.MADE_BY_SPHINX, "index.html"):
        (out / name).touch()
    broken = tmp_path / "99-broken.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# 99\n\n[nowhere](nothing.md)")]), broken)
    with pytest.raises(site.SiteFailed, match=r"notebooks.99-broken\.ipynb:.*nothing\.md"):
        site.build(out, [*execute.all_notebooks(), broken])
    assert sorted(path.name for path in out.iterdir()) == [site.MADE_BY_SPHINX, "index.html"]


def test_outputs_are_kept_until_the_code_or_the_preset_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path)
    path = tmp_path / "00-a.ipynb"

    def executions(text="# A", code="print('ran')", preset="ci"):
        cells = [v4.new_markdown_cell(text), v4.new_code_cell(f"{code}\nopen('executions', 'a').write('x');")]
        nbformat.write(v4.new_notebook(cells=cells), path)
        monkeypatch.setenv("COURSE_PRESET", preset)
        site.refresh("drawn images")
        shown = site.kept(path)
        assert shown.cells[0].source == text and shown.cells[1].outputs[0].text == "ran\n"
        assert shown.metadata.course.preset == preset
        return len((tmp_path / "executions").read_text())

    assert executions() == 1
    assert executions() == 1
    assert executions(text="# Another title") == 1
    assert executions(code="print('r' + 'an')") == 2
    assert executions(code="print('r' + 'an')", preset="workshop") == 3


# ---------------------------------------------------------------------------------------------- links, paths, outputs


@pytest.mark.parametrize(
    ("origin", "link", "expected"),
    [
        ("README.md", "[00](notebooks/00-start-here.ipynb)", "[00](notebooks/00-start-here.ipynb)"),
        ("notebooks/README.md", "[up](../README.md#start)", "[up](../index.md#start)"),
        ("notebooks/README.md", "[r](recipes.py), [s](slurm/README.md)", "[r](recipes.md), [s](slurm/README.md)"),
        ("README.md", "[`helpers`](helpers/traces/__init__.py)", "[`helpers`](api/helpers.traces.rst)"),
        ("README.md", "[locked](requirements.lock)", "locked"),
        ("README.md", "[x](https://example.org), [y](#start)", "[x](https://example.org), [y](#start)"),
        ("README.md", "[nowhere](nothing.md)", "[nowhere](nothing.md)"),
    ],
)
def test_a_link_to_a_file_becomes_one_to_its_page_or_text(tmp_path, monkeypatch, origin, link, expected):
    monkeypatch.setattr(config, "REPOSITORY", "")
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "helpers.traces.rst").touch()
    assert links.rewritten(link, config.PROJECT / origin, tmp_path) == expected


def test_a_link_to_a_file_without_a_page_leads_to_the_repository_if_it_has_an_address(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "REPOSITORY", "https://github.com/ada/course")
    link = links.rewritten("[locked](requirements.lock)", config.PROJECT / "README.md", tmp_path)
    assert link == "[locked](https://github.com/ada/course/blob/main/requirements.lock)"


def test_paths_begin_at_the_folders_that_a_reader_knows(tmp_path):
    text = f"in {config.runs_dir()}/01, {config.PROJECT}/README.md and {config.PROJECT}s"
    assert outputs.without_paths(text) == f"in runs/01, ./README.md and {outputs.without_paths(f'{config.PROJECT}s')}"


def test_other_outputs_stay_as_they_are(tmp_path):
    for output in (v4.new_output("stream", text="a\n  b\n"), v4.new_output("display_data", {"text/plain": "3"})):
        assert outputs.shown(output, tmp_path / "a") == output
