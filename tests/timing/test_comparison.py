import math
import random
import statistics
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import timing
from helpers.timing import comparison as comparison_module


def run_at(images_per_second):
    seconds = 100 / images_per_second
    return timing.Timing(images=100, seconds=seconds, waits=(0.0,), durations=(seconds,))


def comparison(**rates):
    return timing.Comparison({name: tuple(map(run_at, values)) for name, values in rates.items()})


def test_without_tqdm_there_is_no_bar_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    assert timing.interleaved({"a": lambda: run_at(1)}, rounds=2).throughputs("a") == pytest.approx([1, 1])
    assert capsys.readouterr().out == capsys.readouterr().err == ""


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


def test_variants_keep_the_order_in_which_they_were_given(clock):
    variants = {name: lambda: run_at(1) for name in "dacb"}
    assert timing.interleaved(variants, rounds=5).names == list("dacb")


def test_a_ratio_is_taken_round_by_round():
    result = comparison(slow=[100, 50, 200], fast=[200, 100, 400])
    assert result.ratios("fast") == pytest.approx([2, 2, 2])
    assert result.verdict("fast") == "fast against slow: 2.00× the throughput, faster (2.00 to 2.00 in 3 rounds)."


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([100.4, 100.5, 100.3], "1.00× the throughput, equal within 2% (1.00 to 1.01 in 3 rounds)."),
        ([103, 104, 103.5], "1.03× the throughput, faster (1.02 to 1.05 in 3 rounds)."),
        ([50, 49.9, 50.1], "0.50× the throughput, slower (0.50 to 0.50 in 3 rounds)."),
        (
            [150, 90, 100],
            "1.11× the throughput, too noisy to say (0.57 to 2.16 in 3 rounds); take more rounds, or a quieter "
            "machine.",
        ),
    ],
)
def test_a_comparison_ends_in_one_of_three_ways(rates, words):
    assert comparison(a=[100, 100, 100], b=rates).verdict("b") == f"b against a: {words}"


def test_how_close_is_equal_can_be_asked_for():
    result = comparison(a=[100, 100, 100], b=[103, 104, 103.5])
    assert "faster" in result.verdict("b", equal=0.02)
    assert "equal within 5%" in result.verdict("b", equal=0.05)


def test_variants_can_be_compared_with_another_than_the_first():
    assert comparison(a=[1], b=[2], c=[6]).ratios("c", to="b") == pytest.approx([3])


def test_of_one_round_nothing_is_claimed():
    ratio = comparison(a=[1], b=[50]).ratio("b")
    assert (ratio.mean, ratio.lowest, ratio.highest) == (pytest.approx(50), 0, math.inf)
    assert ratio.outcome() == "too noisy to say"


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


# The interval: Student's, of the logarithms

# Student's t, 95 % within, as every textbook has it
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "expected"), STUDENT.items())
def test_students_t_is_that_of_the_textbooks(freedom, expected):
    assert comparison_module.student(freedom) == pytest.approx(expected, rel=0.003)


def noisy(chance, scatter, bursts):
    """A throughput of which the truth is 1: with normal noise, or steady but for moments in which others compute."""
    if not bursts:
        return math.exp(chance.gauss(0, scatter))
    slow = 1 + chance.expovariate(1 / (3 * scatter)) if chance.random() < 0.2 else 1
    return math.exp(chance.gauss(0, scatter / 3)) / slow


def outcomes(chance, rounds, scatter, bursts, gain=1.0, times=1000):
    """The intervals of comparisons of two variants, of which the second has so many times the throughput."""

    def ratio():
        return gain * noisy(chance, scatter, bursts) / noisy(chance, scatter, bursts)

    return [timing.interval([ratio() for _ in range(rounds)]) for _ in range(times)]


@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("rounds", [2, 3, 5, 9])
def test_equal_variants_are_called_different_in_less_than_one_comparison_of_twenty(rounds, bursts):
    chance = random.Random(rounds)
    found = [each for scatter in (0.005, 0.01, 0.02, 0.05, 0.2) for each in outcomes(chance, rounds, scatter, bursts)]
    false = sum(each.outcome() in ("faster", "slower") for each in found)
    assert false / len(found) < 0.05


@pytest.mark.parametrize("rounds", [2, 3, 5, 9])
def test_the_interval_holds_the_truth_in_19_of_20_comparisons(rounds):
    found = outcomes(random.Random(rounds), rounds, 0.1, bursts=False, gain=1.3, times=4000)
    held = statistics.fmean(each.lowest <= 1.3 <= each.highest for each in found)
    assert held == pytest.approx(0.95, abs=0.015)  # 4,000 draws scatter by 0.0035


@pytest.mark.parametrize("bursts", [False, True])
def test_more_rounds_narrow_the_interval_and_find_smaller_gains(bursts):
    chance = random.Random(1)
    widths, finds = [], []
    for rounds in (2, 3, 5, 9, 30):
        found = outcomes(chance, rounds, 0.05, bursts, gain=1.1, times=400)
        widths.append(statistics.median(each.highest / each.lowest for each in found))
        finds.append(statistics.fmean(each.outcome() == "faster" for each in found))
    assert widths == sorted(widths, reverse=True)
    assert finds == sorted(finds)
    assert finds[0] < 0.5 < 0.9 < finds[-1]
