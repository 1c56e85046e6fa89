"""Slides: of the size of a screen, each with its source, words for it, and what to say."""

import re

import pytest
from PIL import Image

from helpers.__main__ import main
from helpers.figures import slides
from helpers.results import scoreboard

pytestmark = pytest.mark.processes  # a dozen and more figures take seconds


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def sections(folder):
    """Return of each slide its title, what to say, the words for it, and its file."""
    page = (folder / "README.md").read_text(encoding="utf-8")
    return re.findall(r"## \d+ (.*)\n\n(.*)\n\n!\[(.*)\]\((.*)\)\n", page)


def test_each_slide_has_the_size_of_a_screen_something_to_say_and_what_it_is_of(runs, tmp_path, capsys):
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "my-own.pptx").write_text("mine")
    assert main(["slides", "--out", str(tmp_path / "slides")]) == 0
    slides_by_title = sections(tmp_path / "slides")
    files = {path.name for path in (tmp_path / "slides").glob("*.png")}
    assert {file for *_, file in slides_by_title} == files and len(files) == len(slides_by_title) > 10
    assert f"{len(files)} slides" in capsys.readouterr().out
    assert (tmp_path / "slides" / "my-own.pptx").read_text() == "mine"
    for title, said, words, file in slides_by_title:
        assert title and said.endswith(("?", ".")) and words.endswith(".")
        picture = Image.open(tmp_path / "slides" / file)
        assert picture.size == (1920, 1080)
        assert len(picture.convert("L").crop((0, 0, 1920, slides.TITLE)).getcolors()) > 1, "no title"
        if title not in ("Memory formats", "Number formats"):  # neither is a measurement
            assert re.search("recorded on|preset|simulated|calculated|not measured", words), title
    assert any(
        title.startswith("The ladder") and title.endswith("recorded on cpu-2-cores") for title, *_ in slides_by_title
    )
    assert not any("this machine" in title for title, *_ in slides_by_title)


def test_ones_own_ladder_is_among_them_once_there_is_one(runs):
    board = scoreboard.REFERENCE / "cpu-2-cores" / "scoreboard.jsonl"
    (runs / "scoreboard.jsonl").write_bytes(board.read_bytes())
    titles = [title for title, *_ in slides._ladders("measured on this machine", scoreboard.ladder())]
    assert "The ladder, 09 to 12, measured on this machine" in titles
    # a rung that nothing is compared with needs no slide
    (runs / "scoreboard.jsonl").write_text(board.read_text().splitlines()[0] + "\n")
    assert list(slides._ladders("measured on this machine", scoreboard.ladder())) == []
