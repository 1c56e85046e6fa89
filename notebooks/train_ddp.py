"""Trains a small network on as many processes as torchrun starts, on one machine or several. It needs torch and NumPy.

    torchrun --standalone --nproc-per-node=2 train_ddp.py DATA [--checkpoint FILE] [--trace FOLDER] [--losses FILE]

DATA holds images.npy (uint8, N × 3 × 32 × 32) and labels.npy (int64, N). Started again, it goes on from the checkpoint
with the very next batch, also with another number of processes: what it learns depends on --batch, not on them.
"""

import argparse
import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # now, or DDP imports it, and then the group's threads outlive destroy_process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def network():
    pairs = ((3, 32), (32, 64), (64, 128))
    layers = [nn.Sequential(nn.Conv2d(old, new, 3, stride=2, padding=1), nn.ReLU()) for old, new in pairs]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def main(args, rank, world, device):
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(network().to(device))  # sends the weights of rank 0 to all
    rate = args.lr * args.batch / 256  # the linear rule: twice the images in a step, twice the learning rate
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    arrays = (np.load(args.data / f"{name}.npy", mmap_mode="c") for name in ("images", "labels"))  # read when indexed
    dataset, step, to_profile = TensorDataset(*map(torch.from_numpy, arrays)), 0, args.trace
    if args.checkpoint and args.checkpoint.exists():
        kept = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    sampler = DistributedSampler(dataset, world, rank, seed=args.seed, drop_last=True)  # rank, rank + world, …
    steps = len(dataset) // args.batch if args.batch % world == 0 else 0  # of an epoch; the ranks share a batch
    assert steps, f"--batch {args.batch}: expected a multiple of the {world} ranks, and at most {len(dataset)} images"
    for epoch in range(step // steps, args.epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        batches = list(BatchSampler(sampler, args.batch // world, drop_last=True))[step % steps : steps]
        loader = DataLoader(dataset, sampler=batches, batch_size=None, num_workers=args.workers)  # indexed by a batch
        begin = time.perf_counter()
        with recording(args.trace, rank) if to_profile else contextlib.nullcontext() as profiler:
            for images, labels in loader:
                step += 1
                optimizer.param_groups[0]["lr"] = rate * min(1, step / max(args.warmup, 1))
                loss = nn.functional.cross_entropy(model(images.to(device) / 128 - 1), labels.to(device))
                optimizer.zero_grad()
                loss.backward()  # when it returns, each gradient is the mean over all ranks
                optimizer.step()
                keep(args, rank, step, model, optimizer, loss.detach() / world)
                if profiler:
                    profiler.step()
        to_profile = None
        if rank == 0:
            print(f"epoch {epoch}: {len(batches) * args.batch / (time.perf_counter() - begin):,.0f} images/s")


def recording(folder, rank):
    handler = tensorboard_trace_handler(str(folder), worker_name=f"rank_{rank}", use_gzip=True)
    return profile(schedule=schedule(wait=4, warmup=2, active=6, repeat=1), on_trace_ready=handler, record_shapes=True)


def keep(args, rank, step, model, optimizer, loss):
    if args.losses:
        dist.all_reduce(loss)  # all ranks must take part
        if rank == 0:
            print(step, loss.item(), sep=",", file=args.losses.open("a"))
    if args.checkpoint and rank == 0 and step % args.every == 0:
        new = args.checkpoint.with_suffix(".new")
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
        new.replace(args.checkpoint)  # whole, or still the older one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "--checkpoint", "--trace", "--losses"):
        parser.add_argument(name, type=Path)
    defaults = {"epochs": 2, "batch": 256, "workers": 0, "every": 10, "warmup": 20, "seed": 0, "timeout": 600}
    for name, default in (defaults | {"lr": 0.05}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # NCCL takes one rank a GPU
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=args.timeout))
    main(args, rank, world, device)
    dist.destroy_process_group()
