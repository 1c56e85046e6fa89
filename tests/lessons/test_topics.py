"""The checklist as a page. (The topics themselves: tests/diagnosis/test_diagnosis.py.)"""

import re

from helpers import config
from helpers.lessons import topics


def test_the_checklist_is_a_page_whose_links_lead_to_the_notebooks(tmp_path):
    page = tmp_path / "new" / "checklist.html"
    topics.write_checklist(page)
    html = page.read_text(encoding="utf-8")
    assert html.count("<tr>") == topics.checklist().count("\n|") - 1  # the line below the heads is no row
    (base,) = re.findall(r'<base href="file://([^"]+)"', html)
    for link in set(re.findall(r'href="([^"#:]+)"', html)):
        assert (config.PROJECT / "notebooks" / link).exists(), link
    assert base.endswith("/notebooks/")
