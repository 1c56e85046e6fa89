import math
import random
import statistics

import pytest

from stepscope import timing
from stepscope.base import confidence

# Student's t, 95% within, as every textbook has it
STUDENT = {1: 12.706, 2: 4.303, 8: 2.306, 9: 2.262, 30: 2.042, 120: 1.980}


def test_students_t_is_that_of_the_textbooks():
    assert {freedom: confidence.student(freedom) for freedom in STUDENT} == pytest.approx(STUDENT, rel=0.003)


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

    return [confidence.geometric([ratio() for _ in range(rounds)]) for _ in range(times)]


@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("rounds", [2, 3, 5, 9])
def test_equal_variants_are_called_different_in_less_than_one_comparison_of_twenty(rounds, bursts):
    chance = random.Random(rounds)
    found = [each for scatter in (0.005, 0.01, 0.02, 0.05, 0.2) for each in outcomes(chance, rounds, scatter, bursts)]
    false = sum(timing.outcome(each) in ("faster", "slower") for each in found)
    assert false / len(found) < 0.05


@pytest.mark.parametrize("rounds", [2, 3, 5, 9])
def test_the_interval_holds_the_truth_in_19_of_20_comparisons(rounds):
    found = outcomes(random.Random(rounds), rounds, 0.1, bursts=False, gain=1.3, times=4000)
    held = statistics.fmean(each.lowest <= 1.3 <= each.highest for each in found)
    assert held == pytest.approx(0.95, abs=0.015)  # 4,000 draws scatter by 0.0035


def test_the_interval_of_a_difference_holds_the_truth_in_19_of_20_cases_or_more():
    chance = random.Random(2)

    def sample(mean, count):
        return [chance.gauss(mean, 1) for _ in range(count)]

    intervals = [confidence.change(sample(9, 4), sample(8, 8)) for _ in range(2000)]
    assert statistics.fmean(each.lowest <= -1 <= each.highest for each in intervals) > 0.94


def test_of_single_values_no_interval_is_known():
    assert confidence.change([1.0], [3.0]) == confidence.Interval(2.0, -math.inf, math.inf, 1)
