import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope import timing


def run_at(images_per_second):
    seconds = 100 / images_per_second
    return timing.Timing(images=100, seconds=seconds, waits=(0.0,), durations=(seconds,))


def comparison(**rates):
    return timing.Comparison({name: tuple(map(run_at, values)) for name, values in rates.items()})


def order_of(rounds):
    order = []
    timing.interleaved({name: lambda name=name: order.append(name) or run_at(1) for name in "abc"}, rounds)
    return "".join(order)


def test_each_round_has_every_variant_once_in_an_order_that_changes_and_can_be_repeated(clock):
    order = order_of(rounds=12)
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(rounds) == 12
    assert all(sorted(each) == list("abc") for each in rounds)
    assert len(set(rounds)) > 2
    assert order == order_of(rounds=12)


def test_a_ratio_is_taken_round_by_round():
    result = comparison(slow=[100, 50, 200], fast=[200, 100, 400])
    assert result.ratios("fast") == pytest.approx([2, 2, 2])
    assert result.ratios("slow", to="fast") == pytest.approx([0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("rates", "outcome"),
    [
        ([100.4, 100.5, 100.3], "equal .*(1.00 to 1.01"),
        ([103, 104, 101.8], "faster (1.002 to 1.06"),
        ([50, 49.9, 50.1], "slower (0.50 to 0.50"),
        ([150, 90, 100], "too noisy .*(0.57 to 2.16"),
        ([1, 9000, 100], "too different"),
    ],
)
def test_a_comparison_ends_in_one_of_four_ways(rates, outcome):
    assert re.search(outcome.replace("(", r"\("), comparison(a=[100, 100, 100], b=rates).verdict("b"))


def test_of_one_round_nothing_is_claimed():
    ratio = comparison(a=[1], b=[50]).ratio("b")
    assert (ratio.mean, ratio.lowest, ratio.highest) == (pytest.approx(50), 0, math.inf)
    assert timing.outcome(ratio) == "too noisy to say"


def test_the_fastest_is_that_with_the_highest_mean():
    result = comparison(a=[10, 90], b=[40, 41], c=[39, 40])
    assert result.fastest() == "b"
    assert result.fastest("ac") == "c"


rates = st.floats(1.0, 1e6)


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=9))
def test_what_is_printed_together_follows_from_each_other(rounds):
    first, second = zip(*rounds, strict=True)
    result = comparison(a=first, b=second)
    ratio = result.ratio("b")
    assert ratio.mean == pytest.approx(result.mean("b").images_per_second / result.mean("a").images_per_second)
    assert ratio.mean == pytest.approx(result.throughput("b").mean / result.throughput("a").mean)
    assert ratio.mean == pytest.approx(result.mean("a").step_ms / result.mean("b").step_ms)
    assert result.ratio("a", to="b").mean == pytest.approx(1 / ratio.mean)
    assert ratio.lowest <= ratio.mean * (1 + 1e-9)
    assert ratio.highest >= ratio.mean * (1 - 1e-9)


def test_the_table_has_a_row_for_every_variant():
    table = comparison(a=[100, 121], b=[220, 231]).table()
    assert table.loc["a", "images/s"] == "110"
    assert table.loc["b", "images/s"] == "225"
    assert table.loc["b", "ratio"] == "2.05×"
    assert table.loc["a", ["ratio", "its 95% interval"]].tolist() == ["1×", ""]
