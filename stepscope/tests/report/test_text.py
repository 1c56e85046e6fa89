"""Tests of a diagnosis as text for a terminal, and as HTML for a notebook."""

import html
import re

import pytest

from stepscope.base.wording import milliseconds
from stepscope.report.findings import Finding
from stepscope.rules.conclusion import conclude


@pytest.mark.parametrize(
    ("gain", "numbers"),
    [(0.2, "1.25× (or −10 ms"), (0.8, "5.00× (or −40 ms"), (1.0, "100× (or −50 ms"), (0.01, "less than")],
)
def test_a_gain_is_a_factor_and_a_number_of_milliseconds(gain, numbers):
    assert numbers in Finding("a.fault", "a fault", "copies", gain, "", "", "a topic").saving(50)


def test_the_range_of_a_gain_is_a_pair_of_factors():
    text = Finding("a.fault", "a fault", "copies", 0.5, "", "", "a topic", range=(0.2, 0.75)).saving(50)
    assert all(number in text for number in ("2.00×", "1.25 to 4.00", "−25 ms"))


def test_a_time_has_two_digits_in_a_unit_that_shows_them():
    assert [*map(milliseconds, (0, 0.0042, 0.85, 8.5, 85))] == ["0.00 ms", "4.2 µs", "0.85 ms", "8.5 ms", "85 ms"]


def a_diagnosis():
    findings = [
        Finding("loader.few", "too <few> workers", "loading", 0.5, "word " * 40, "DataLoader(…)", "more workers"),
        Finding("copies.other", "another", "copies", 0.2, "1.2 ms", "x.to(…)", "pinned <memory>"),
    ]
    return conclude(40.0, [("steps", "8"), ("a long name", "x " * 80)], findings, ["why <it> is so"])


def test_the_text_fits_a_terminal_and_is_aligned():
    lines = str(a_diagnosis()).splitlines()
    assert max(map(len, lines)) <= 98
    assert lines[0].startswith("Verdict: loading. ")
    assert lines[2].index("8") == lines[3].index("x")
    assert any("2.00× (or −20 ms of a step of 40 ms)" in line for line in lines)
    assert any(line.strip() == "→ more workers" for line in lines)


def test_topics_with_a_link_are_linked_in_text_and_html():
    linked = a_diagnosis().linked({"more workers": "there/03&more.html", "another topic": "nowhere"})
    lines = [line.strip() for line in str(linked).splitlines()]
    assert "→ more workers: there/03&more.html" in lines and "→ pinned <memory>" in lines
    assert "nowhere" not in str(linked)
    assert re.findall("<a .*?</a>", linked._repr_html_()) == ['<a href="there/03&amp;more.html">more workers</a>']


def test_text_is_escaped_in_html():
    page = a_diagnosis()._repr_html_()
    assert "href" not in page and html.escape("→ pinned <memory>") in page
    assert html.escape("too <few> workers") in page and html.escape("why <it> is so") in page
    assert "color" not in page  # so that it can be read on light and on dark


def test_colours_change_nothing_but_colours():
    plain, coloured = a_diagnosis().text(), a_diagnosis().text(colours=True)
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain == str(a_diagnosis())
    assert re.findall(r"\x1b\[\d+m(.*?)\x1b\[0m", coloured) == ["Verdict: loading.", "at most 2.00×", "at most 1.25×"]
