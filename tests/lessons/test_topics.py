"""The notebooks of the diagnosis' topics, and the checklist as a page."""

import re

from helpers import config
from helpers.lessons import topics


def test_each_notebook_that_exists_is_linked_and_no_other():
    linked = {link.removesuffix(".ipynb") for link in topics.links().values()}
    named = set(topics.NOTEBOOKS.values())
    assert linked == {name for name in named if (config.PROJECT / "notebooks" / f"{name}.ipynb").exists()}
    assert named - linked <= topics.PLANNED


def test_the_checklist_is_a_page_whose_links_lead_to_the_notebooks(tmp_path):
    page = tmp_path / "new" / "checklist.html"
    topics.write_checklist(page)
    html = page.read_text(encoding="utf-8")
    assert html.count("<tr>") == topics.checklist().count("\n|") - 1  # the line below the heads is no row
    (base,) = re.findall(r'<base href="file://([^"]+)"', html)
    for link in set(re.findall(r'href="([^"#:]+)"', html)):
        assert (config.PROJECT / "notebooks" / link).exists(), link
    assert base.endswith("/notebooks/")
