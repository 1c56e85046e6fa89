"""Two processes that average their gradients by hand.

Report: facebookresearch/fairscale PR #327 (2021-01-26); meta-pytorch/torchft PR #111 (2025-02-18); computational-cell-analytics/micro-sam PR #1329 (2026-08-14).
Symptom: with more processes, or a slower connection, most of the step is the exchange of gradients.
Truth: one all-reduce for each of the many small tensors; remedy: put them into one flat buffer and reduce that.
"""
import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.gate * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64, depth=6):
        super().__init__()
        self.enter, self.leave = nn.Linear(32, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(depth)])

    def forward(self, x):
        return self.leave(self.blocks(self.enter(x)))


def average_gradients(model, world):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # FAULT
        parameter.grad /= world


def average_gradients_flat(model, world):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in
                                     zip(flat.split([gradient.numel() for gradient in gradients]), gradients)])


def work(rank, world, port, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8000, 32), torch.randint(0, 10, (8000,)))
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = Net()
    average = average_gradients_flat if args.fixed else average_gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average(model, world)
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="one flat buffer")
    parser.add_argument("--steps", type=int, default=380)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(2, port, args), nprocs=2)


if __name__ == "__main__":
    main()
