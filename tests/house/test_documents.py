"""What the pages of the project link and name is there."""

import json
import re

import pytest

from helpers import config

PAGES = [page for folder in ("", "stepscope", "notebooks") for page in sorted((config.PROJECT / folder).glob("*.md"))]


def anchors(page):
    """The anchors that GitHub makes of the headings of a page."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
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
        if re.match(r"(helpers|stepscope|tests|notebooks|data)/", name):
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
