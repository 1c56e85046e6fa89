import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from support.clock import Clock
from torch import nn

from helpers import config, simulate

# -------------------------------------------------------------------------------------------------- a job of four ranks

HEAD = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
from pathlib import Path
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from helpers import simulate
from helpers.simulate import network as module

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
world = dist.get_world_size()
fast = simulate.SlowNetwork(10_000, latency_ms=0.01)
found = {}
"""
TAIL = """
(folder / f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""

JOB = """
import time
from torch.profiler import ProfilerActivity, profile


def gradients(hook=None, group=None, synced=True, batches=1, cap=0.001, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap, **options)
    if hook:
        model.register_comm_hook(group, hook)
    chance = torch.Generator().manual_seed(rank)
    for batch in range(batches):
        if batch == 1:
            model.zero_grad()
        for last in (False, True):
            if not last and not synced:
                with model.no_sync():
                    model(torch.randn(16, 8, generator=chance)).square().sum().backward()
            elif last:
                model(torch.randn(16, 8, generator=chance)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(one, other):
    # Not to the last bit: the hook divides by the number of ranks, where DDP multiplies by one over it
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


# Where ranks cannot share memory. The first use: later ones share what this has made
real, module.np.memmap = module.np.memmap, None


def refuse(*_, **__):
    raise FileNotFoundError("no such file here")


module.np.memmap = refuse if rank == 1 else real
try:
    fast.all_reduce(torch.ones(3))
except RuntimeError as error:
    found["apart"] = str(error)
module.np.memmap = real

plain = gradients()
found["averaged"] = same(plain, gradients(fast.hook))
found["later batches"] = same(gradients(batches=4), gradients(fast.hook, batches=4))
found["views"] = same(plain, gradients(fast.hook, gradient_as_bucket_view=True))
found["no_sync"] = same(gradients(synced=False), gradients(fast.hook, synced=False))
found["differs without"] = not same(gradients(synced=False), plain)
for name in ("fp16", "bf16"):
    # Under names of their own: DistributedDataParallel refuses "bf16_compress_hook" where PyTorch has no CUDA
    whole, wrapper = getattr(default_hooks, f"{name}_compress_hook"), getattr(default_hooks, f"{name}_compress_wrapper")
    wrapped = wrapper(fast.hook)
    expected = gradients(lambda state, bucket, hook=whole: hook(state, bucket))
    found[name] = same(expected, gradients(lambda state, bucket, hook=wrapped: hook(state, bucket)))
    found[f"{name} is coarser"] = not same(expected, plain)
for size in (1, 2, 3):
    group = dist.new_group(range(size))
    if rank < size:
        found[f"{size} ranks"] = same(gradients(group=group), gradients(fast.hook, group))

# Later and later on each rank; each asks for two, the second while the first is on its way
link = module._links[dist.group.WORLD]
slow, before = simulate.SlowNetwork(10, latency_ms=1), len(link.ends)
dist.barrier()
time.sleep(0.05 * rank)
asked = time.perf_counter()
futures = [slow.all_reduce(torch.full((size,), float(rank))) for size in (100_000, 50_000)]
arrived = []
for future in futures:
    found.setdefault("sums", []).append(future.wait().unique().tolist())
    arrived.append(time.perf_counter())
found |= {"asked": asked, "arrived": arrived, "ends": link.ends, "last": link.ends[before:]}

tensor = torch.ones(1_000_000)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    slow.all_reduce(tensor).wait()
found["in the trace"] = {event.name: event.time_range.elapsed_us() / 1e6
                         for event in profiler.events() if event.name.startswith("gloo:")}
found["left"] = [str(path) for path in Path(os.environ["TMPDIR"]).glob("simulated-network-*")]
"""


def start(source, folder, ranks):
    script = folder / "job.py"
    script.write_text(HEAD + source + TAIL, encoding="utf-8")
    (folder / "temporary").mkdir()
    common = {"PYTHONPATH": str(config.PROJECT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    common |= {"TMPDIR": str(folder / "temporary"), "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)], env=os.environ | common | {"RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def finish(processes):
    """Return what each process wrote to standard error; none is left."""
    try:
        return [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What four ranks found, in the order of ranks."""
    folder = tmp_path_factory.mktemp("job")
    processes = start(JOB, folder, ranks=4)
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "which", ["averaged", "later batches", "views", "no_sync", "differs without", "fp16", "bf16", "fp16 is coarser"]
)
def test_gradients_are_those_without_the_simulated_network(job, which):
    assert [found[which] for found in job] == [True] * 4


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_averaged_within_the_group_that_is_passed(job, size):
    assert [found.get(f"{size} ranks") for found in job] == [True] * size + [None] * (4 - size)


@pytest.mark.processes
def test_tensors_are_summed_over_all_ranks(job):
    assert [found["sums"] for found in job] == [[[6.0], [6.0]]] * 4


@pytest.mark.processes
def test_a_transfer_begins_with_the_last_rank_and_they_queue(job):
    network = simulate.SlowNetwork(10, latency_ms=1)
    first, second = network.seconds(400_000, 4), network.seconds(200_000, 4)
    last = max(found["asked"] for found in job)
    for found in job:
        assert found["last"][0] >= last + first
        assert found["last"][1] == pytest.approx(found["last"][0] + second)
        assert all(arrived >= end for arrived, end in zip(found["arrived"], found["last"], strict=True))


@pytest.mark.processes
def test_all_ranks_calculate_the_same_end_of_each_transfer(job):
    assert len(job[0]["ends"]) > 10
    assert [found["ends"] for found in job] == [job[0]["ends"]] * 4


@pytest.mark.processes
def test_the_time_on_the_network_is_inside_of_the_all_reduce_in_the_trace(job):
    names, seconds = zip(*[item for found in job for item in found["in the trace"].items()], strict=True)
    assert names == ("gloo:all_reduce",) * 4
    # Of the rank that asked first; half, since its thread may begin late where the machine is busy
    assert max(seconds) > simulate.SlowNetwork(10, latency_ms=1).seconds(4e6, 4) / 2


@pytest.mark.processes
def test_ranks_that_share_no_memory_are_refused_all_together(job):
    expected = "found rank 1: no such file here. Between machines there is a real network"
    assert [expected in found["apart"] for found in job] == [True] * 4


@pytest.mark.processes
def test_nothing_is_left_in_the_folder_for_temporary_files(job):
    assert [found["left"] for found in job] == [[]] * 4


DYING = """
model = DistributedDataParallel(nn.Linear(500, 500))
model.register_comm_hook(None, fast.hook)
model(torch.ones(500)).sum().backward()
if rank == 1:
    os._exit(9)
model(torch.ones(500)).sum().backward()
"""


@pytest.mark.processes
def test_when_a_rank_dies_the_others_get_the_error_of_the_all_reduce(tmp_path):
    processes = start(DYING, tmp_path, ranks=2)
    errors = finish(processes)
    assert [process.returncode for process in processes] == [1, 9]
    assert "RuntimeError" in errors[0] and "backward" in errors[0]


# ------------------------------------------------------------------------------------------------------------ the dials


def test_an_all_reduce_takes_as_long_as_in_a_ring():
    network = simulate.SlowNetwork(mb_per_s=100, latency_ms=2)
    assert network.seconds(10e6, 1) == 0
    assert network.seconds(10e6, 2) == pytest.approx(0.1 + 0.004)
    assert network.seconds(10e6, 4) == pytest.approx(0.15 + 0.012)
    assert network.seconds(10e6, 1000) == pytest.approx(0.2, rel=1e-3, abs=4)


def test_many_small_buckets_take_longer_than_a_large_one():
    network = simulate.SlowNetwork(mb_per_s=125)
    assert 1000 * network.seconds(25_000, 4) > 2 * network.seconds(25e6, 4)


def test_a_simulated_network_says_that_it_is_one_and_can_be_sent_to_ranks():
    network = simulate.SlowNetwork(125)
    assert str(network) == "simulated network (125 MB/s, 0.1 ms latency)"
    assert pickle.loads(pickle.dumps(network)) == network


@pytest.mark.parametrize("dials", [(0, 1), (-1, 1), (100, -0.1)])
def test_a_network_that_cannot_exist_is_refused(dials):
    with pytest.raises(ValueError, match="a bandwidth above 0 MB/s and a latency of 0 ms or more, found simulated"):
        simulate.SlowNetwork(*dials)


def test_tensors_elsewhere_than_on_the_cpu_are_refused():
    with pytest.raises(ValueError, match="Expected a tensor on the CPU, found one on meta: a simulated network"):
        simulate.SlowNetwork(125).all_reduce(torch.ones(3, device="meta"))


def test_a_process_that_is_no_rank_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        simulate.SlowNetwork(125).all_reduce(torch.ones(3))


# ------------------------------------------------------------------------------------------------------ sleeping layers


def test_a_sleeping_layer_sleeps_forward_and_backward_and_takes_no_cpu_time(monkeypatch):
    clock = Clock(monkeypatch, simulate)
    y = simulate.SleepingLayer(0.01, forward_ms=4, backward_ms=8)(torch.ones(3))
    assert clock.now == pytest.approx(0.004)
    y.sum().backward()
    assert clock.now == pytest.approx(0.012)
    assert clock.worked == 0


def test_a_sleeping_layer_has_the_gradients_of_what_it_computes():
    layers = nn.Sequential(*[simulate.SleepingLayer(40e-6, 0, 0).double() for _ in range(3)])
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layers(x), (x, *layers.parameters()))


def test_the_gradient_of_a_sleeping_layer_shows_which_batch_it_was():
    layer = simulate.SleepingLayer(2, 0, 0)
    layer(torch.tensor([2.0, 4.0])).mean().backward()
    assert layer.weight.grad.shape == (500_000,) and layer.weight.nbytes == 2e6
    assert layer.weight.grad * layer.weight.numel() == pytest.approx(torch.full((500_000,), 3.0))


def test_a_sleeping_layer_is_an_operator_in_a_trace_and_shows_its_dials():
    layer = simulate.SleepingLayer(0.5, forward_ms=3, backward_ms=5)
    assert str(layer) == "SleepingLayer(megabytes=0.5, forward_ms=3, backward_ms=5)"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        layer(torch.ones(1)).sum().backward()
    spans = {event.name: event.time_range.elapsed_us() for event in profiler.events()}
    assert spans["simulate::sleeping_layer_forward"] >= 3000
    assert spans["simulate::sleeping_layer_backward"] >= 5000
