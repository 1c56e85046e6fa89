"""Records a toy network that two ranks train over gloo, once as it should be and once with each fault.

    RANK=… WORLD_SIZE=2 python recorded_ranks.py FOLDER

Layers and storage sleep, and the network between the ranks is simulated: what is found is set by dials, and large.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, Dataset

from helpers import simulate

STEPS = 3  # recorded


class Storage(Dataset):
    """Batches of which each takes a while."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1 + STEPS

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(4)


class Counter(nn.Module):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(3))

    def forward(self, x):
        return x + self.zero[0]


def layers(megabytes=0.02, ms=40, count=4):
    return nn.Sequential(*(simulate.SleepingLayer(megabytes, ms, ms) for _ in range(count)))


def ddp(model, network=None, **options):
    model = DistributedDataParallel(model, **options)
    if network:
        model.register_comm_hook(None, network.hook)
    return model


def record(folder, model, seconds=0.0, exchange=lambda: None):
    handler = tensorboard_trace_handler(str(folder), worker_name=f"rank_{dist.get_rank()}", use_gzip=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(DataLoader(Storage(seconds), batch_size=None))
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True, on_trace_ready=handler
    ) as profiler:
        for _ in range(1 + STEPS):
            optimizer.zero_grad()
            model(next(batches)).sum().backward()
            exchange()
            optimizer.step()
            profiler.step()


def main(folder):
    record(folder / "healthy", ddp(layers(ms=100)))
    record(folder / "late", ddp(layers()), seconds=0.4 * (dist.get_rank() == 1))

    model, network = layers(megabytes=1), simulate.SlowNetwork(mb_per_s=20)

    def by_hand():
        for parameter in model.parameters():
            network.all_reduce(parameter.grad).wait()

    record(folder / "by hand", model, exchange=by_hand)
    record(folder / "one bucket", ddp(layers(1), network, bucket_cap_mb=100))
    record(folder / "slow network", ddp(layers(1), simulate.SlowNetwork(mb_per_s=12), bucket_cap_mb=0.5))
    slow = simulate.SlowNetwork(mb_per_s=1e4, latency_ms=8)
    record(folder / "small buckets", ddp(layers(ms=5, count=40), slow, bucket_cap_mb=0.01))
    record(folder / "buffers", ddp(nn.Sequential(Counter(), layers())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(sys.argv[1]).resolve()}/store", rank=rank, world_size=world
    )
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
