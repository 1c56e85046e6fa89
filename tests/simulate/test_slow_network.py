import json

import pytest
import torch
from support import processes

from helpers import simulate

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
from helpers.simulate import slow_network as module

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
fast = simulate.SlowNetwork(10_000, latency_ms=0.01)
found = {}
"""
TAIL = """
(folder / f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""

JOB = """
import contextlib
import time


def gradients(hook=None, group=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    if hook:
        model.register_comm_hook(group, hook)
    chance = torch.Generator().manual_seed(rank)
    for last in (False, True):
        with contextlib.nullcontext() if last else model.no_sync():
            model(torch.randn(16, 8, generator=chance)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(one, other):
    # Not to the last bit: the hook divides by the number of ranks, where DDP multiplies by one over it
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


plain = gradients()
found["averaged"] = same(plain, gradients(fast.hook))
# Under names of their own: DistributedDataParallel refuses "bf16_compress_hook" where PyTorch has no CUDA
wrapped = default_hooks.bf16_compress_wrapper(fast.hook)
expected = gradients(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
found["bf16"] = same(expected, gradients(lambda state, bucket: wrapped(state, bucket)))
found["bf16 is coarser"] = not same(expected, plain)
for size in (1, 2, 3):
    group = dist.new_group(range(size))
    if rank < size:
        found[f"{size} ranks"] = same(gradients(group=group), gradients(fast.hook, group))

# Later and later on each rank; each asks for two, the second while the first is on its way
link = module._links[dist.group.WORLD]
slow, before = simulate.SlowNetwork(10, latency_ms=1), len(link.ends)
dist.barrier()
time.sleep(0.05 * rank)
futures = [slow.all_reduce(torch.full((size,), float(rank))) for size in (100_000, 50_000)]
arrived = []
for future in futures:
    found.setdefault("sums", []).append(future.wait().unique().tolist())
    arrived.append(time.perf_counter())
asked = link.asked[before : before + 2].max(axis=1).tolist()
found |= {"asked": asked, "arrived": arrived, "ends": link.ends, "last": link.ends[before:]}
"""


def run(source, folder, ranks):
    script = folder / "job.py"
    script.write_text(HEAD + source + TAIL, encoding="utf-8")
    return processes.run(script, folder, ranks)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What four ranks found, in the order of ranks."""
    folder = tmp_path_factory.mktemp("job")
    ended = run(JOB, folder, ranks=4)
    assert [code for code, _ in ended] == [0] * 4, ended
    assert not list(folder.glob("simulated-network-*")), "nothing is left among temporary files"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.processes
def test_gradients_are_those_without_the_simulated_network(job):
    for rank, found in enumerate(job):
        groups = {name for name, value in found.items() if name.endswith("ranks") and value is True}
        assert groups == {f"{size} ranks" for size in (1, 2, 3) if rank < size}
        assert [found[name] for name in ("averaged", "bf16", "bf16 is coarser")] == [True] * 3
        assert found["sums"] == [[6.0], [6.0]]


@pytest.mark.processes
def test_a_transfer_begins_with_the_last_rank_and_they_queue_alike_on_all_ranks(job):
    network = simulate.SlowNetwork(10, latency_ms=1)
    assert [found["ends"] for found in job] == [job[0]["ends"]] * 4
    for found in job:
        first = found["asked"][0] + network.seconds(400_000, 4)
        second = max(found["asked"][1], first) + network.seconds(200_000, 4)
        assert found["last"] == pytest.approx([first, second], rel=0, abs=1e-6)
        assert all(arrived >= end for arrived, end in zip(found["arrived"], found["last"], strict=True))


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
    (code, written), (dead, _) = run(DYING, tmp_path, ranks=2)
    assert (code, dead) == (1, 9)
    assert "RuntimeError" in written and "backward" in written


def test_an_all_reduce_takes_as_long_as_in_a_ring():
    network = simulate.SlowNetwork(mb_per_s=100, latency_ms=2)
    assert network.seconds(10e6, 1) == 0
    assert network.seconds(10e6, 2) == pytest.approx(0.1 + 0.004)
    assert network.seconds(10e6, 4) == pytest.approx(0.15 + 0.012)


def test_tensors_elsewhere_than_on_the_cpu_and_processes_that_are_no_ranks_are_refused():
    with pytest.raises(ValueError, match="found one on meta: a simulated network"):
        simulate.SlowNetwork(125).all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        simulate.SlowNetwork(125).all_reduce(torch.ones(3))
