"""What the pages of the project link and name is there."""

import re

import pytest

from helpers import config

PAGES = [*sorted(config.PROJECT.glob("*.md")), *sorted((config.PROJECT / "notebooks").glob("*.md"))]
ARCHITECTURE = (config.PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")
HELPERS = config.PROJECT / "helpers"


def anchors(page):
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def missing_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if "://" not in link and (not path.exists() or (anchor and anchor not in anchors(path))):
            yield link


def missing_paths(text):
    """Paths in backticks that do not exist. One without a folder lies in the folder that was named last before it."""
    folder = config.PROJECT
    for name in re.findall(r"`([\w./-]+)`", text):
        path = config.PROJECT / name
        if re.match(r"(helpers|tests|notebooks|data)/", name):
            folder = path if name.endswith("/") else path.parent
        elif re.fullmatch(r"\w+\.py", name):
            path = folder / name
        else:
            continue
        if not path.exists() and "NN-" not in name:
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    assert list(missing_links(page)) == []


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_that_a_page_names_exist(name):
    assert list(missing_paths((config.PROJECT / name).read_text(encoding="utf-8"))) == []


def test_every_room_has_its_row():
    rooms = {path.parent.name + "/" for path in HELPERS.glob("*/__init__.py")}
    modules = {path.name for path in HELPERS.glob("*.py")} - {"__init__.py"}
    rows = re.findall(r"^\| `helpers/([^`]+)` \|", ARCHITECTURE, re.MULTILINE)
    assert set(rows) == rooms | modules


def test_the_architecture_fits_on_a_page():
    assert ARCHITECTURE.count("\n") < 120


def test_a_link_or_path_to_nothing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n[here](#a-page), [there](#another), [nowhere](nothing.md), `helpers/data/none.py`, `x.py`"
    )
    assert list(missing_links(page)) == ["#another", "nothing.md"]
    assert list(missing_paths(page.read_text())) == ["helpers/data/none.py", "x.py"]
