import itertools
import json
import os
import subprocess
import sys

import pytest

from stepscope import timing

JOB = """
import json, os, sys, time
from pathlib import Path

import torch.distributed as dist

from stepscope import timing

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
    common = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
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
    assert all("['even', 'late']" in each["error"] for each in job)


def test_a_process_that_is_no_rank_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match="torchrun"):
        timing.interleaved_ranks({"a": int}, rounds=1, steps=1)


@pytest.mark.parametrize("text", ["[]", '{"timings": {"a": [{"images": 1}]}}', '{"a": 1}'])
def test_another_file_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="other.json"):
        timing.read_comparison(path)
