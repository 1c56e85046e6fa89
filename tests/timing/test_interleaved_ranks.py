import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from helpers import config, timing

JOB = """
import json, os, sys, time
from pathlib import Path

import torch.distributed as dist

from helpers import timing

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
order, found = [], {}


def step(name, seconds):
    order.append(name)
    time.sleep(seconds)


variants = {"even": lambda: step("even", 0.001), "late": lambda: step("late", 0.03 * rank), "c": lambda: step("c", 0)}
result = timing.interleaved_ranks(variants, rounds=6, steps=3, images=7, warmup=2, path=folder / "to" / "result.json")
found["order"] = order
found["timings"] = {name: [[run.images, run.seconds, run.waits, run.durations] for run in result.timings[name]]
                    for name in result.names}
if rank == 0:
    found["read"] = timing.read_comparison(folder / "to" / "result.json") == result
    variants.pop("c")
try:
    timing.interleaved_ranks(variants, rounds=1, steps=1)
except ValueError as error:
    found["error"] = str(error)
(folder / f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What two ranks found, of which the second is late in one variant."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    common = {"PYTHONPATH": str(config.PROJECT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "job.py"), str(folder)], env=os.environ | common | {"RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def alone(tmp_path):
    """This process is the only rank of a job."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.processes
def test_all_ranks_take_the_same_steps_in_an_order_that_changes(job):
    first, second = (found["order"] for found in job)
    assert first == second
    # Three timed steps each; before them two to warm up in the first of six rounds, and one in the others
    starts = [*range(0, 15, 5), *range(15, len(first), 4)]
    runs = [first[start:end] for start, end in itertools.pairwise([*starts, len(first)])]
    assert all(len(set(run)) == 1 for run in runs)
    rounds = [tuple(run[0] for run in runs[start : start + 3]) for start in range(0, len(runs), 3)]
    assert len(rounds) == 6
    assert all(sorted(each) == ["c", "even", "late"] for each in rounds)
    assert len(set(rounds)) > 2


@pytest.mark.processes
def test_all_ranks_find_the_same_and_it_is_the_slowest_ranks_time(job):
    first, second = (found["timings"] for found in job)
    assert first == second
    assert list(first) == ["even", "late", "c"]
    for images, seconds, waits, durations in first["late"]:
        assert (images, waits) == (21, [0.0] * 3)
        assert seconds >= 0.09 and min(durations) >= 0.03


@pytest.mark.processes
def test_rank_0_writes_what_is_read_back_equal(job):
    assert job[0]["read"]


@pytest.mark.processes
def test_ranks_that_are_called_differently_are_refused_on_all_of_them(job):
    assert all(
        "Expected the same call on all ranks, found {'variants': ['even', 'late'" in each["error"] for each in job
    )


def test_a_single_rank_is_a_job_too(alone, tmp_path):
    path = tmp_path / "result.json"
    result = timing.interleaved_ranks({"a": lambda: None, "b": lambda: None}, rounds=2, steps=5, images=3, path=path)
    assert result.names == ["a", "b"]
    assert [run.images for run in result.timings["b"]] == [15, 15]
    assert timing.read_comparison(path) == result


@pytest.mark.parametrize(("variants", "rounds", "steps"), [({}, 1, 1), ({"a": int}, 0, 1), ({"a": int}, 1, 0)])
def test_nothing_to_time_is_refused(alone, variants, rounds, steps):
    with pytest.raises(ValueError, match="a variant, a round and a step or more"):
        timing.interleaved_ranks(variants, rounds, steps)


def test_a_process_that_is_no_rank_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match="start the script by torchrun"):
        timing.interleaved_ranks({"a": int}, rounds=1, steps=1)


@pytest.mark.parametrize("text", ["", "[]", '{"timings": {"a": [{"images": 1}]}}', '{"timings": 3}', '{"a": 1}'])
def test_another_file_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="other.json: expected a file of timing.interleaved_ranks"):
        timing.read_comparison(path)


def test_every_number_of_a_timing_survives_the_file(alone, tmp_path):
    path = tmp_path / "result.json"
    result = timing.interleaved_ranks({"a": lambda: None}, rounds=1, steps=3, path=path)
    (run,) = timing.read_comparison(path).timings["a"]
    assert dataclasses.asdict(run) == dataclasses.asdict(result.timings["a"][0])
    assert len(run.durations) == 3 and run.seconds > 0
