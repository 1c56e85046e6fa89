"""The page of a class: who is how far, what each change gained for whom, and that nothing is lost on bad input."""

import html
import io
import json
import os
import re

import pytest
from PIL import Image
from support.timed import compared

from helpers.__main__ import main
from helpers.lessons import class_page
from helpers.results import scoreboard

NAME = '<i>Ada & "Đặng"'


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Add a result to a reader's scoreboard, as the notebooks do; the rounds' throughputs are given."""

    def add(reader, rung, *rates, before=None):
        monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "class" / reader))
        comparison, baseline = compared(*rates, before=before), "before" if before else None
        return scoreboard.add(rung, comparison, "now", baseline=baseline, loader=[], step=print, data="CIFAR-10")

    return add


@pytest.fixture
def write(tmp_path, capsys):
    """Write the page of the class; return its text, the exit status, and what was reported as left out."""

    def write(*options):
        status = main(["class", str(tmp_path / "class"), "--out", str(tmp_path / "page.html"), *options])
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        return page, status, capsys.readouterr().err

    return write


def rows(page, heading):
    """Return the rows below a heading, as lists of their cells' texts."""
    part = page.split(f"<h2>{heading}</h2>")[1].split("<h2>")[0]
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", part, re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.S) for line in lines]
    return [[html.unescape(cell).strip() for cell in row] for row in cells]


def test_a_page_has_each_readers_latest_results_as_they_are_and_asks_for_nothing_else(add, write):
    add("Boris", "01 naive", 90, 95)
    add(NAME, "01 naive", 100, 110)
    add(NAME, "03 $\\frac{$ <script>", 200, 210, before=[100, 110])
    add(NAME, "03 $\\frac{$ <script>", 300, 310, before=[100, 110])  # the second time counts
    page, status, _ = write()
    assert status == 0
    assert [row[:2] for row in rows(page, "Progress")[1:]] == [[NAME, "2 of 2"], ["Boris", "1 of 2"]]
    assert rows(page, "Images per second")[1:] == [["01 naive", "105", "92"], ["03 $\\frac{$ <script>", "305", "–"]]
    assert [row[0] for row in rows(page, "Measured on")[1:]] == [NAME, "Boris"]
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|<script|<link|<i>""", page)
    (alt,) = re.findall('<img alt="(.*?)"', page)
    assert "1 reader" in alt


def test_outcomes_are_counted_by_rung_and_baseline(add, write):
    add("a", "04 bytes", 200, 201, before=[100, 101])
    add("b", "04 bytes", 50, 50, before=[100, 101])
    add("c", "04 bytes", 100, 100, before=[100, 100])
    add("d", "04 bytes", 100, 400, before=[200, 100])
    add("d", "05 photos", 300, 301, before=[100, 100])
    page, *_ = write()
    header, row, other = rows(page, "What each change gained")
    assert header[1:6] == ["readers", "faster", "slower", "equal", "too noisy to say"]
    assert row[:6] == ["04 bytes to “before”", "4", "1", "1", "1", "1"]
    assert row[6:] == ["1.21×", "0.50×", "2.00×"]  # (√2 + 1) / 2 is the median
    assert other[1:6] == ["1", "1", "0", "0", "0"]


@pytest.mark.parametrize(
    ("ratios", "question"),
    [((2, 0.5), r"faster for reader 0 .*; slower for reader 1 "), ((2, 9), "2.0.× for reader 0"), ((2, 2.1), None)],
)
def test_what_readers_disagree_on_is_a_question_and_what_they_agree_on_is_none(add, write, ratios, question):
    for number, ratio in enumerate(ratios):
        add(f"reader {number}", "06 packed", 100 * ratio, 101 * ratio, before=[100, 100])
    page, *_ = write()
    (found,) = re.findall("<li>(.*)</li>", page)
    assert bool(re.match("06 packed to “before”: ", found)) == bool(question)
    assert re.search(question or "on no rung", found)


def test_a_damaged_line_is_named_with_what_was_found_and_the_rest_is_shown(add, write, tmp_path):
    add("Ada", "01 naive", 100, 110)
    board = tmp_path / "class" / "Ada" / "scoreboard.jsonl"
    good = json.loads(board.read_text())
    bad = ["not json", json.dumps(good | {"step_ms": "x"})]
    board.write_text("\n".join([*bad, json.dumps(good | {"rung": "03 workers"})]) + "\n")
    boris = tmp_path / "class" / "Boris" / "scoreboard.jsonl"
    boris.parent.mkdir()
    boris.write_bytes(b"\xff\xfePK\x03")
    page, status, err = write()
    assert status == 1
    assert [row[:2] for row in rows(page, "Progress")[1:]] == [["Ada", "1 of 1"], ["Boris", "0 of 1"]]
    assert re.findall(r"line (\d): expected a result", err) == ["1", "2"]
    assert "'not json'" in err and "step_ms is 'x'" in err and "not json" not in page
    assert "Ada: 2 lines" in page and "Boris: 1 line" in page
    assert err.count("expected a scoreboard, found") == 1


@pytest.mark.skipif(os.name == "nt", reason="not every account may make links there")
def test_a_link_which_may_lead_to_a_private_file_is_not_read(add, write, tmp_path):
    add("Ada", "01 naive", 100, 110)
    link = tmp_path / "class" / "Boris" / "scoreboard.jsonl"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "class" / "Ada" / "scoreboard.jsonl")
    page, status, err = write()
    assert [row[:2] for row in rows(page, "Progress")[1:]] == [["Ada", "1 of 1"], ["Boris", "0 of 1"]]
    assert status == 1 and err.count("expected a scoreboard, found") == 1


def test_without_names_none_is_anywhere_on_the_page(add, write, tmp_path):
    for name in ("Ada", "Boris"):
        add(f"{name}/runs", "01 naive", 100, 110)
        add(f"{name}/runs", "03 workers", 200 if name == "Ada" else 50, 200, before=[100, 110])
    with open(tmp_path / "class" / "Ada" / "runs" / "scoreboard.jsonl", "a") as board:
        board.write("Ada was here\n")
    page, _, err = write("--anonymous")
    assert "Ada" not in page and "Boris" not in page and "Ada" in err
    assert [row[0] for row in rows(page, "Progress")[1:]] == ["reader 1", "reader 2"]
    assert re.search(r"reader \d: 1 line", page)


@pytest.mark.parametrize("found", ["no such folder", "a folder without any"])
def test_a_folder_without_scoreboards_is_refused(tmp_path, found, capsys):
    if "without" in found:
        (tmp_path / "class").mkdir()
    assert main(["class", str(tmp_path / "class"), "--out", str(tmp_path / "page.html")]) == 1
    assert re.fullmatch(rf"CourseError: .*scoreboard.jsonl in it, and found {found}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.browser
@pytest.mark.processes
def test_the_page_fits_a_phone_and_has_light_and_dark(tmp_path, add, chromium):
    for number in range(12):
        for rung in ("03 more workers", "06 packed in one file", "11 mixed precision"):
            add(f"reader with a long name {number}", rung, 100 + number, 110, before=[100, 100])
    class_page.write(tmp_path / "class", tmp_path / "page.html")
    colours = {}
    for scheme in ("light", "dark"):
        page = chromium.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        page.goto((tmp_path / "page.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        colours[scheme] = Image.open(io.BytesIO(page.screenshot())).convert("L").getpixel((2, 2))
        page.close()
    assert colours["light"] > 200 and colours["dark"] < 60
