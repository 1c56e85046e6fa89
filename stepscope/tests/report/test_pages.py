"""Tests of results as a page and as Markdown: complete, harmless, and readable on a telephone and in the dark."""

import re
from dataclasses import replace

import pytest
from support import made_results
from support.made_results import HOSTILE, found, write

from stepscope import report
from stepscope.cli import main
from stepscope.report import context

SOURCE = """import torch
table = read("/home/ada/secret/table.csv")

def train():
    for batch in loader:
        step(batch)
        log(loss.item())
"""


def page_of(file):
    assert main(["page", str(file)]) == 0
    return file.with_suffix(".html").read_text()


def test_the_page_shows_each_rank_and_step_and_loads_nothing_from_other_servers(tmp_path):
    file = write(tmp_path / "found.json", found(3, 4, 5, waits=1), found(5, 6, 7, waits=2, name=HOSTILE))
    page = page_of(file)
    assert page.count('<span class="wait"') == 2 + 3 + 3
    assert "rank 1: 6.0 ms, 2.0 ms of it waiting" in page
    assert page.count("<b>Verdict: loading.</b>") == 2
    assert not re.search("<script|https?:|src=|url\\(", page)
    assert "&lt;script&gt;" in page


def test_the_page_says_what_was_run_and_where_the_time_of_a_step_goes(tmp_path):
    diagnosis = found(3, 4, waits=1, shares={"loading": 0.3, "forward": 0.7})
    page = page_of(write(tmp_path / "found.json", diagnosis, script="train.py --name 'a <b>'"))
    assert "<code>train.py --name &#x27;a &lt;b&gt;&#x27;</code>" in page
    assert 'aria-label="The parts of a step: loading 30%, forward 70%"' in page
    assert report.load(tmp_path / "found.json")["results"][0]["diagnosis"].shares == diagnosis.shares


def test_a_line_is_shown_in_context_only_if_the_file_still_has_it(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    script = tmp_path / "package" / "train.py"
    script.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    line = "train.py:7: log(loss.item()), in item of torch"
    assert [number for number, _ in context.around(line)] == [5, 6, 7]
    page = page_of(write(tmp_path / "found.json", found(1, 2, line=line)))
    assert re.findall('<span class="here"> +(.*?)</span>', page) == ["7          log(loss.item())"]
    script.write_text(SOURCE.replace("log(", "print("))
    assert context.around(line) == [] == context.around("cell:2: x = 1")
    assert "log(loss.item())" not in re.sub("<p>.*?</p>", "", page_of(tmp_path / "found.json"))


def test_the_page_of_tried_settings_has_their_ratios_and_the_lines_to_write(tmp_path):
    page = page_of(made_results.write_tried(tmp_path / "tried.json"))
    assert page.index("1.50× (1.40 – 1.60)") < page.index("1.01× (0.95 – 1.08)")
    assert "fails: &lt;no memory&gt;" in page and "DataLoader(…, num_workers=4)" in page
    content = made_results.TRIED | {"recommended": None}
    assert "No setting is surely faster." in page_of(made_results.write_tried(tmp_path / "none.json", content))


def test_a_path_in_the_context_has_no_folders(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    page = page_of(write(tmp_path / "found.json", found(1, 2, line='train.py:2: table = read("…/table.csv")')))
    assert "…/table.csv" in page and "ada" not in page and page.count('<span class="here">') == 1


def test_one_round_has_no_interval(tmp_path):
    ratio = {"mean": 1.5, "lowest": 0.0, "highest": None, "count": 1}
    settings = [made_results.TRIED["settings"][0] | {"ratio": ratio}]
    file = made_results.write_tried(tmp_path / "tried.json", made_results.TRIED | {"settings": settings})
    for text in (page_of(file), report.markdown(report.load(file), "train.py")):
        assert "1.50× (interval unknown)" in text and "0.00" not in text


@pytest.mark.parametrize("lost", ["rounds", "settings", "ratio", "recommended"])
def test_a_file_of_tried_settings_with_missing_data_is_refused(tmp_path, capsys, lost):
    file = made_results.write_tried(tmp_path / "tried.json")
    file.write_text(file.read_text().replace(f'"{lost}"', '"other"'))
    assert main(["page", str(file)]) == 1
    assert "tried.json: expected results" in capsys.readouterr().err and not file.with_suffix(".html").exists()


def test_tried_settings_are_not_compared_as_runs(tmp_path, capsys):
    file = str(made_results.write_tried(tmp_path / "tried.json"))
    assert main(["compare", file, file]) == 1
    assert "found results of `stepscope try`" in capsys.readouterr().err


def test_a_file_without_results_gives_no_page(tmp_path, capsys):
    (tmp_path / "found.json").write_text(report.document("run", []))
    assert main(["page", str(tmp_path / "found.json")]) == 1
    assert "Expected a result" in capsys.readouterr().err and not (tmp_path / "found.html").exists()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1200, "dark")])
def test_a_page_fits_a_telephone_and_its_text_stands_out_in_the_dark(tmp_path, chromium, width, scheme):
    change = "torch.utils.data." + "a_very_long_name_of_a_function(" * 4
    file = write(tmp_path / "found.json", found(3, 4, waits=1, shares={"loading": 1.0}, change=change))
    pages = [file, made_results.write_tried(tmp_path / "tried.json")]
    view = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    for each in pages:
        page_of(each)
        view.goto(each.with_suffix(".html").as_uri())
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        bars = view.locator(".bars, .parts, .track").all()
        assert bars and all(bar.bounding_box()["width"] > 60 for bar in bars)
        seen = "(name) => getComputedStyle(document.querySelector(name)).color"
        text = [int(number) for number in re.findall(r"\d+", view.evaluate(seen, "h1"))[:3]]
        assert (sum(text) > 3 * 128) == (scheme == "dark")


def test_markdown_has_tables_that_no_text_breaks(tmp_path):
    diagnosis = found(1, 2, name="a | b\n<c>", change="x | y\nz", line="train.py:7: a | b")
    content = report.load(write(tmp_path / "found.json", diagnosis, diagnosis))
    rows = [line for line in report.markdown(content, "train.py").splitlines() if line.startswith("| a \\|")]
    assert len(rows) == 2 and all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    assert "<c>" not in rows[0] and "`` x \\| y ``<br>`` z ``" in rows[0]
    tried = report.markdown(report.load(made_results.write_tried(tmp_path / "tried.json")), "train.py")
    assert "| `` num_workers=4 `` | 1.50× (1.40 – 1.60) | the same losses |" in tried
    assert "fails: &lt;no memory&gt;" in tried


def test_markdown_keeps_the_caveats_and_mentions_nobody(tmp_path):
    diagnosis = replace(found(1, 2, name="@torch.no_grad() in __getitem__"), unknown=("how exact the gains are",))
    text = report.markdown(report.load(write(tmp_path / "found.json", diagnosis)), "train.py")
    assert "Unknown: how exact the gains are" in text and "\\@torch.no\\_grad() in \\_\\_getitem\\_\\_" in text
