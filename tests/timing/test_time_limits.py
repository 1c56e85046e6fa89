"""However slow a step is, what is measured ends: by simulated clocks, so these tests take no time themselves."""

import pytest
import torch
from support.clock import Clock
from torch import nn

from helpers import config, timing
from helpers.training import precision

BATCH = torch.zeros(32, 3, 8, 8), torch.zeros(32, dtype=torch.long)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setenv("COURSE_PRESET", "ci")
    return Clock(monkeypatch, timing, precision)


def step_of(clock, seconds_per_image, seen):
    def step(images, labels):
        seen.append(len(images))
        clock.sleep(seconds_per_image * len(images))

    return step


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 20), (0.4, 5), (5.0, 2)])
def test_a_timed_run_of_slow_steps_has_fewer_of_them_but_never_less_than_two(clock, seconds, steps):
    run = timing.loop([BATCH], lambda *batch: clock.sleep(seconds), 20, warmup=0, longest=2)
    assert len(run.durations) == len(run.waits) == steps
    assert run.step_ms == pytest.approx(1e3 * seconds)
    assert run.images == 32 * steps


def test_the_warm_up_of_slow_steps_ends_early_too(clock):
    seen = []
    timing.loop([BATCH], step_of(clock, 1.0, seen), 20, warmup=10, longest=2)
    assert len(seen) == 1 + 2


def test_what_limits_a_run_is_the_preset_unless_something_else_is_said(clock):
    longest = config.preset().longest_run
    run = timing.loop([BATCH], lambda *batch: clock.sleep(longest / 3.5), 20)
    assert len(run.durations) == 4


@pytest.mark.parametrize(("seconds", "rounds"), [(1, 9), (4, 3), (100, 2)])
def test_a_comparison_of_slow_runs_has_fewer_rounds_but_never_less_than_two(clock, capsys, seconds, rounds):
    def run():
        clock.sleep(seconds)
        return timing.Timing(1, seconds, (0.0,), (seconds,))

    found = timing.interleaved({"A": run, "B": run}, 9, longest=20)
    assert {name: len(runs) for name, runs in found.timings.items()} == {"A": rounds, "B": rounds}
    assert (f"{rounds} rounds instead of 9" in capsys.readouterr().out) == (rounds < 9)


def test_a_comparison_of_one_round_stays_one_of_one_round(clock):
    found = timing.interleaved({"A": lambda: timing.Timing(1, 1.0, (0.0,), (1.0,))}, 1)
    assert found.throughputs("A") == [1.0]


@pytest.mark.parametrize(("share", "calls"), [(0.01, 20), (0.25, 4), (60, 2)])
def test_slow_calls_are_repeated_less_often(clock, share, calls):
    seconds = share * config.preset().longest_run
    assert timing.each_call_ms(lambda: clock.sleep(seconds)) == pytest.approx([1e3 * seconds] * calls)


def test_what_is_done_to_slow_items_is_timed_with_the_first_of_them(clock):
    seen = []

    def read(item):
        seen.append(item)
        clock.sleep(config.preset().longest_run / 2.5)

    assert timing.stages({"read": read}, range(100)) == pytest.approx({"read": 1e6 * config.preset().longest_run / 2.5})
    assert seen == [0, 1, 2] * 2


def test_the_warm_up_of_slow_loading_and_phases_ends_early_too(clock):
    class Slow(list):
        num_workers, prefetch_factor = 4, 25

        def __iter__(self):
            for number in range(1000):
                clock.sleep(1)
                seen.append(number)
                yield BATCH

    seen, model = [], nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    assert timing.warmup_steps(Slow()) == 102
    timing.loading(Slow(), seconds=4)
    assert len(seen) == 4 + 4
    timing.phases(Slow(), model, torch.optim.SGD(model.parameters(), lr=0.1), 20)
    assert len(seen) == 8 + 1 + 2  # a second is longer than a run may be


def test_phases_of_slow_steps_are_means_over_those_that_were_taken(clock):
    class Slow(nn.Linear):
        def forward(self, images):
            clock.sleep(1.5)
            return super().forward(images.flatten(1))

    model = Slow(3 * 8 * 8, 10)
    phases = timing.phases([BATCH], model, torch.optim.SGD(model.parameters(), lr=0.1), 20)
    assert phases == pytest.approx({"loading": 0, "copy": 0, "forward": 1500, "backward": 0, "optimizer": 0})


def test_a_step_that_is_fast_enough_is_tried_with_all_images(clock):
    seen = []
    trial = precision.try_step(step_of(clock, 0.004, seen), BATCH, usual_ms=150)
    assert sorted(set(seen)) == [2, 4, 8, 16, 32]
    assert (trial.images, trial.affordable, trial.fast_enough, trial.faster) == (32, 32, True, True)
    assert trial.ratio == pytest.approx(0.004 * 32 / 0.150)
    assert str(trial) == "a step of 32 images takes 128 ms, 0.85 times as long as in float32."


def test_a_step_that_takes_140_times_as_long_is_given_up_after_two_images(clock):
    seen = []
    trial = precision.try_step(step_of(clock, 140 * 0.150 / 32, seen), BATCH, usual_ms=150)
    assert seen == [2, 2] and clock.now < 3  # seconds; a step with all images would take 21
    assert (trial.images, trial.affordable, trial.fast_enough) == (2, 0, False)
    assert str(trial) == (
        "a step of 2 of the 32 images takes 1,312 ms, all of them in float32 150 ms: over 3 times as long, too slow to "
        "train in here."
    )


def test_a_step_that_takes_eight_times_as_long_is_given_up_before_all_images(clock):
    trial = precision.try_step(step_of(clock, 8 * 0.150 / 32, []), BATCH, usual_ms=150)
    assert (trial.images, trial.affordable, trial.fast_enough) == (16, 8, False)


def test_a_step_of_all_images_that_is_just_too_slow_says_so(clock):
    trial = precision.try_step(step_of(clock, 3.1 * 0.150 / 32, []), BATCH, usual_ms=150, baseline="TF32")
    assert (trial.images, trial.affordable, trial.fast_enough, trial.faster) == (32, 16, False, False)
    assert str(trial) == "a step of 32 images takes 465 ms, 3.10 times as long as in TF32: too slow to train in here."


@pytest.mark.parametrize("times", [0.5, 1, 2.9, 8, 140, 10_000])
@pytest.mark.parametrize("usual", [0.01, 0.15, 3, 60])
def test_to_find_out_takes_no_longer_than_said_but_for_the_first_call(clock, times, usual):
    trial = precision.try_step(step_of(clock, times * usual / 32, []), BATCH, usual_ms=1e3 * usual, longest=8)
    first_call = 2 * times * usual / 32
    assert clock.now <= max(8, first_call)
    assert trial.seconds == clock.now


def test_a_machine_so_busy_that_the_time_is_up_is_not_trained_on_in_this_format(clock):
    trial = precision.try_step(step_of(clock, 3 / 32, []), BATCH, usual_ms=3000, longest=8)
    assert (trial.images, trial.affordable, trial.fast_enough) == (16, 16, False)
    assert trial.ratio < 1 and not trial.faster  # half the images in less time say nothing
    assert str(trial) == (
        "a step of 16 of the 32 images takes 1,500 ms, all of them in float32 3,000 ms; to find that out took 3 s, so "
        "more were not tried: not trained in here."
    )


def test_a_call_that_something_else_delays_once_counts_by_the_other_one(clock):
    delays = iter([0, 0, 9, *[0] * 20])

    def step(images, labels):
        clock.sleep(0.001 * len(images) + next(delays))

    assert precision.try_step(step, BATCH, usual_ms=150, longest=20).fast_enough


@pytest.mark.parametrize("count", [1, 2, 3, 33])
def test_a_batch_of_any_size_is_tried_whole(clock, count):
    seen = []
    batch = torch.zeros(count, 1), torch.zeros(count)
    assert precision.try_step(step_of(clock, 0.001, seen), batch, usual_ms=150).images == count
    assert min(seen) == min(count, 2)
