import sys

import pytest

from helpers import timing


def run_at(images_per_second):
    seconds = 100 / images_per_second
    return timing.Timing(images=100, seconds=seconds, waits=(0.0,), durations=(seconds,))


def comparison(**rates):
    return timing.Comparison({name: tuple(map(run_at, values)) for name, values in rates.items()})


def test_without_tqdm_there_is_no_bar_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    assert timing.interleaved({"a": lambda: run_at(1)}, rounds=2).throughputs("a") == [1, 1]
    assert capsys.readouterr().out == capsys.readouterr().err == ""


def test_variants_are_timed_interleaved(clock):
    order = []
    variants = {name: lambda name=name: order.append(name) or run_at(1) for name in "ab"}
    timing.interleaved(variants, rounds=3)
    assert "".join(order) == "ababab"


def test_a_ratio_is_taken_round_by_round():
    result = comparison(slow=[100, 50, 200], fast=[200, 100, 400])
    assert result.ratios("fast") == [2, 2, 2]
    assert result.verdict("fast").startswith("fast against slow: 2.00× the throughput, faster in every round")


def test_a_ratio_inside_the_spread_is_no_effect():
    assert "no measurable effect" in comparison(a=[100, 100], b=[101, 99]).verdict("b")


def test_a_ratio_that_differs_by_less_than_a_percent_is_no_effect_however_steady():
    assert "no measurable effect" in comparison(a=[100, 100], b=[100.4, 100.5]).verdict("b")
    assert "faster in every round" in comparison(a=[100, 100], b=[102, 103]).verdict("b")


def test_a_variant_that_is_slower_is_said_to_be():
    assert "0.50× the throughput, slower in every round" in comparison(a=[100, 100], b=[50, 49.9]).verdict("b")


def test_variants_can_be_compared_with_another_than_the_first():
    assert comparison(a=[1], b=[2], c=[6]).ratios("c", to="b") == [3]


def test_the_median_run_is_one_of_the_runs():
    result = comparison(a=[3, 1, 2, 9])
    assert result.median("a").images_per_second == pytest.approx(2)


def test_the_table_has_a_row_for_every_variant():
    table = comparison(a=[100, 120, 110], b=[220, 240, 230]).table()
    assert table.loc["a", "images/s"] == "110"
    assert table.loc["b", "lowest – highest"] == "220 – 240"
    assert table.loc["b", "ratio"] == "2.09×"
