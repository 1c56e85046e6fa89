"""Variants timed interleaved: by one process, and by all ranks of a job."""

import json
import math
import os
import re
import time
from dataclasses import astuple

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import processes

from stepscope import diagnosis, timing
from stepscope.base import confidence
from stepscope.timing import profiling
from stepscope.timing.comparison import shuffled


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
    assert ["".join(sorted(each)) for each in rounds] == ["abc"] * 12
    assert len(set(rounds)) > 2
    assert rounds[1::2] == [each[::-1] for each in rounds[::2]]  # each is as often before another as after it
    assert order == order_of(rounds=12)


def test_a_ratio_is_taken_round_by_round():
    ratio = comparison(slow=[100, 50, 200], fast=[200, 100, 400]).ratio("fast")
    assert (ratio.mean, ratio.lowest, ratio.highest, ratio.count) == pytest.approx((2, 2, 2, 3))


@pytest.mark.parametrize(
    ("rates", "outcome"),
    [
        ([100.4, 100.5, 100.3], "equal .*(1.00 to 1.01"),
        ([103, 104, 101.8], "faster (1.002 to 1.06"),
        ([50, 49.9, 50.1], "slower (0.498 to 0.502"),
        ([150, 90, 100], "b against a: too noisy to say (in 3 rounds only a gain of 2.31× or more would show"),
        ([2_000, 40_000, 9_000], "faster (3 rounds, too different for an interval"),
        ([1, 9000, 100], "too different"),
        ([5000], "too noisy to say (1 round is too few"),
        ([150, 90], "too noisy to say (2 rounds are too few"),
    ],
)
def test_a_comparison_ends_in_one_of_four_ways(rates, outcome):
    assert re.search(outcome.replace("(", r"\("), comparison(a=[100] * len(rates), b=rates).verdict("b"))


@pytest.mark.parametrize("call", [
    lambda: timing.interleaved({}, 3), lambda: timing.interleaved({"a": int}, 0), lambda: timing.call_ms(int, 0),
    lambda: confidence.geometric([]), lambda: confidence.geometric([1, math.nan]), lambda: timing.loop([[]], print, 0),
    lambda: diagnosis.diagnose([[]], print, steps=0), lambda: profiling.record([[]], print, os.devnull, active=0),
])  # fmt: skip
def test_arguments_that_cannot_be_timed_or_averaged_are_refused(call):
    with pytest.raises(ValueError, match="Expected .*, found"):
        call()


rates = st.floats(1.0, 1e6)


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=9))
def test_printed_means_and_ratios_are_consistent(rounds):
    first, second = zip(*rounds, strict=True)
    result = comparison(a=first, b=second)
    ratio = result.ratio("b")
    assert ratio.mean == pytest.approx(result.mean("b").images_per_second / result.mean("a").images_per_second)
    assert ratio.mean == pytest.approx(result.throughput("b").mean / result.throughput("a").mean)
    assert ratio.mean == pytest.approx(result.mean("a").step_ms / result.mean("b").step_ms)
    assert result.ratio("a", to="b").mean == pytest.approx(1 / ratio.mean)
    assert ratio.lowest <= ratio.mean * (1 + 1e-9)
    assert ratio.highest >= ratio.mean * (1 - 1e-9)


def test_the_table_has_a_row_for_every_variant_and_four_columns():
    table = comparison(a=[675_000, 676_783, 675_891], b=[220_000, 231_000, 280_000]).table()
    assert table.columns.tolist() == ["images/s", "ms a step", "host waits", "ratio"]
    assert table.loc["a"].tolist() == ["676,000", "0.148", "0%", "1×"]
    assert table.loc["b", ["images/s", "ms a step"]].tolist() == ["240,000", "0.41"]  # the third digit is not certain
    assert re.fullmatch(r"0\.36× \(0\.\d\d – 0\.\d\d\)", table.loc["b", "ratio"])
    assert comparison(a=[9], b=[9]).table().loc["b", "ratio"] == "1.00× (interval unknown)"


def test_variants_that_are_too_noisy_share_the_last_line_of_the_verdicts():
    result = comparison(a=[100] * 3, b=[150, 90, 100], c=[200] * 3, d=[130, 95, 100], e=[100, 140, 90])
    lines = result.verdicts().splitlines()
    assert len(lines) == 2 and lines[0] == result.verdict("c")
    assert lines[1].startswith("b, d and e against a: too noisy to say (in 3 rounds only a gain of ")
    largest = max(result.ratio(name).detectable for name in "bde")
    assert f"{largest:.2f}× or more" in lines[1]
    assert result.verdicts(["c"]) == result.verdict("c") and result.verdicts(["b"]) == result.verdict("b")
    assert "a" in result.verdicts(to="c").splitlines()[0]


def be_a_rank(rank, folder):
    """Time variants as one of two ranks, of which the second is late in one variant; write the results as JSON."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    order = []

    def step(name, seconds):
        order.append(name)
        time.sleep(seconds)

    def refused(variants, rounds):
        with pytest.raises(ValueError, match="Expected") as error:
            timing.interleaved_ranks(variants, rounds=rounds, steps=1)
        return str(error.value)

    late = {"even": lambda: step("even", 0.001), "late": lambda: step("late", 0.03 * rank), "c": lambda: step("c", 0)}
    path = folder / "to" / "result.json"
    result = timing.interleaved_ranks(late, rounds=6, steps=3, images=7, warmup=2, path=path)
    found = {
        "order": order,
        "timings": {name: [[*astuple(run)[:4]] for run in runs] for name, runs in result.timings.items()},
        "read": timing.read_comparison(path) == result if rank == 0 else None,  # only rank 0 has written it
        "others": refused({"even": int, "late": int} if rank == 0 else late, 1),
        "no round": refused({"a": int}, 0),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("job")
    ranks = [processes.forked(be_a_rank, rank, folder) for rank in range(2)]
    try:
        for each in ranks:
            each.join()
    finally:
        for each in ranks:
            each.kill()
    assert [each.exitcode for each in ranks] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.processes
def test_all_ranks_take_the_same_steps_in_the_order_of_interleaved(job):
    steps = []
    for number, order in enumerate(shuffled(["even", "late", "c"], 6)):
        warmup = 1 if number else 2
        steps += [name for name in order for _ in range(warmup + 3)]
    assert [found["order"] for found in job] == [steps] * 2


@pytest.mark.processes
def test_all_ranks_return_the_time_of_the_slowest_rank_and_the_file_holds_it(job):
    first, second = (found["timings"] for found in job)
    assert first == second
    assert list(first) == ["even", "late", "c"]
    for images, seconds, waits, durations in first["late"]:
        assert (images, waits) == (21, [0.0] * 3)
        assert seconds >= 0.09 and min(durations) >= 0.03
    assert job[0]["read"]


@pytest.mark.processes
@pytest.mark.parametrize(("called", "said"), [("others", "['even', 'late']"), ("no round", "one round")])
def test_calls_that_differ_between_ranks_or_time_nothing_are_refused_on_all_ranks(job, called, said):
    assert all(said in each[called] for each in job)


def test_a_process_that_is_not_a_rank_is_refused_with_a_remedy():
    with pytest.raises(RuntimeError, match="torchrun"):
        timing.interleaved_ranks({"a": int}, rounds=1, steps=1)
