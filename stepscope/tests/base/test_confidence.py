"""What is claimed of measurements is true in 19 of 20 cases, whatever their noise.

    python test_confidence.py

prints what a comparison of so many rounds sees.
"""

import itertools
import math
import statistics

import numpy as np
import pytest

from stepscope import timing
from stepscope.base import confidence
from stepscope.timing.comparison import shuffled

# Student's t by degrees of freedom and the share within, as every textbook has it
STUDENT = {(1, 0.95): 12.706, (2, 0.95): 4.303, (9, 0.95): 2.262, (120, 0.95): 1.980, (4, 0.99): 4.604}


def test_students_t_equals_the_values_of_textbooks():
    assert {of: confidence.student(*of) for of in STUDENT} == pytest.approx(STUDENT, rel=5e-4)


# Kinds of noise: logarithms of throughputs, a row a round and a column a variant. `at` is when in all runs each was
# timed, `second` when in its round, from 0 to 1.
NOISE = {
    "normal": lambda chance, at, second: chance.normal(0, 0.02, at.shape),
    "far outliers": lambda chance, at, second: 0.01 * chance.standard_t(3, at.shape),
    "others compute at moments": lambda chance, at, second: (
        chance.normal(0, 0.005, at.shape) - (chance.random(at.shape) < 0.2) * chance.exponential(0.06, at.shape)
    ),
    "slow rounds": lambda chance, at, second: chance.normal(0, 0.1, (len(at), 1)) + chance.normal(0, 0.01, at.shape),
    "slower and slower": lambda chance, at, second: chance.normal(0, 0.01, at.shape) - 0.01 * at,
    "wandering": lambda chance, at, second: (
        np.cumsum(chance.normal(0, 0.01, at.size))[at] + chance.normal(0, 0.005, at.shape)
    ),
    "later in a round is 3% slower": lambda chance, at, second: chance.normal(0, 0.005, at.shape) - 0.03 * second,
    "unequal": lambda chance, at, second: chance.normal(0, 1, at.shape) * np.geomspace(0.002, 0.1, at.shape[1]),
}


def comparison(chance, noise, rounds, gains):
    """Return a comparison of variants, the first with a throughput of 1 and the others with these."""
    count = 1 + len(gains)
    orders = np.array([list(order) for order in shuffled(range(count), rounds)])
    within = orders.argsort(axis=1)
    rates = noise(chance, within + count * np.arange(rounds)[:, None], within / (count - 1)) + np.log([1, *gains])
    runs = np.exp(rates).T
    return timing.Comparison({
        str(name): tuple(timing.Timing(1, 1 / rate, (0.0,), (1 / rate,)) for rate in of) for name, of in enumerate(runs)
    })  # fmt: skip


def claimed(compared):
    """Return the variants that a comparison calls faster or slower than the first."""
    base = compared.throughputs("0")
    ratios = {name: np.divide(compared.throughputs(name), base) for name in compared.names[1:]}
    intervals = confidence.together(ratios)
    return [name for name, each in intervals.items() if timing.outcome(each) in ("faster", "slower")]


def share_with_a_claim(kind, rounds, variants, times, gain=1.0):
    """Return in what share of comparisons another variant is called different, if the second is faster by a gain."""
    chance, gains = np.random.default_rng([rounds, variants]), [gain, *[1.0] * (variants - 2)]
    return statistics.fmean(bool(claimed(comparison(chance, NOISE[kind], rounds, gains))) for _ in range(times))


@pytest.mark.processes  # for seconds
@pytest.mark.parametrize("kind", NOISE)
def test_fewer_than_one_of_twenty_comparisons_call_an_equal_variant_different(kind):
    cases = [(rounds, variants) for rounds in (2, 3, 5, 10) for variants in (2, 3, 8)]
    assert statistics.fmean(share_with_a_claim(kind, *case, times=100) for case in cases) < 0.05


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("rounds", range(2, 11))
@pytest.mark.parametrize("variants", range(2, 9))
def test_false_differences_are_rare_for_every_number_of_rounds_and_variants(kind, rounds, variants):
    assert share_with_a_claim(kind, rounds, variants, times=1000) < 0.05 + 0.02  # 1,000 draws scatter by 0.007


@pytest.mark.parametrize("rounds", [4, 6, 10])
def test_the_detectable_gain_is_seen_in_three_of_four_comparisons(rounds):
    chance = np.random.default_rng(rounds)
    ratios = (comparison(chance, NOISE["normal"], rounds, [1.0]).ratio("1") for _ in range(200))
    gain = statistics.fmean(ratio.detectable for ratio in ratios)
    assert share_with_a_claim("normal", rounds, 2, 400, gain) == pytest.approx(0.75, abs=0.08)


def test_the_interval_of_a_ratio_is_wider_among_several_ratios():
    compared = comparison(np.random.default_rng(0), NOISE["normal"], 5, [1.0, 1.1, 1.2])
    alone = {
        name: timing.Comparison({each: compared.timings[each] for each in ("0", name)}).ratio(name) for name in "123"
    }
    widths = {name: compared.ratio(name).highest / alone[name].highest for name in "123"}
    assert min(widths.values()) == 1 < max(widths.values())  # the last one that leaves 1 out is as if it were alone
    assert {name for name in "123" if timing.outcome(compared.ratio(name)) == "faster"} == set(claimed(compared))
    assert compared.ratio("2", to="2").mean == 1


@pytest.mark.parametrize("rounds", [2, 3, 5, 9])
def test_the_interval_holds_the_truth_in_19_of_20_comparisons(rounds):
    ratios = np.exp(np.random.default_rng(rounds).normal(math.log(1.3), 0.1, (4000, rounds)))
    found = [confidence.geometric(each) for each in ratios]
    held = statistics.fmean(each.lowest <= 1.3 <= each.highest for each in found)
    assert held == pytest.approx(0.95, abs=0.015)  # 4,000 draws scatter by 0.0035


def test_the_interval_of_a_difference_holds_the_truth_in_19_of_20_cases_or_more():
    chance = np.random.default_rng(2)

    def sample(mean, count):
        return chance.normal(mean, 1, count).tolist()

    intervals = [confidence.change(sample(9, 4), sample(8, 8)) for _ in range(2000)]
    assert statistics.fmean(each.lowest <= -1 <= each.highest for each in intervals) > 0.94


def test_a_single_value_has_no_interval():
    assert confidence.change([1.0], [3.0]) == confidence.Interval(2.0, -math.inf, math.inf, 1)


if __name__ == "__main__":
    for gain, variants in itertools.product((1.02, 1.05, 1.1, 1.3), (2, 5)):
        seen = {rounds: share_with_a_claim("normal", rounds, variants, 1000, gain) for rounds in (2, 3, 5, 9)}
        print(f"runs scatter by 2%, {variants} variants, one of them {gain}×: seen by rounds", seen)
