"""Trains a small network on as many processes as torchrun starts, on one machine or several. It needs torch and NumPy.

    torchrun --standalone --nproc-per-node=2 train_ddp.py DATA [--checkpoint FILE] [--trace FOLDER] [--losses FILE]

DATA holds images.npy (uint8, N × 3 × 32 × 32) and labels.npy (int64, N). Started again, it goes on from the checkpoint
with the very next batch, also with another number of processes: what it learns depends on --batch, not on them.
"""

import argparse
import contextlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # only for a clean exit with gloo: else its threads outlive destroy_process_group
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def network():
    pairs = ((3, 32), (32, 64), (64, 128))
    layers = [nn.Sequential(nn.Conv2d(old, new, 3, stride=2, padding=1), nn.ReLU()) for old, new in pairs]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def main(args, rank, world, device, profiler):
    torch.manual_seed(args.seed)
    model, step, writer, writing = network().to(device), 0, ThreadPoolExecutor(1), []  # what the thread writes now
    rate = args.lr * args.batch / 256  # the linear rule: twice the images in a step, twice the learning rate
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    arrays = (np.load(args.data / f"{name}.npy", mmap_mode="c") for name in ("images", "labels"))  # read when indexed
    dataset = TensorDataset(*map(torch.from_numpy, arrays))
    if args.checkpoint and args.checkpoint.exists():
        assert zipfile.ZipFile(args.checkpoint).testzip() is None, f"{args.checkpoint} is damaged: delete it"
        kept = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    dist.all_reduce(ends := torch.tensor([step, -step], device=device), dist.ReduceOp.MAX)
    assert ends.sum() == 0, f"ranks go on from steps {-ends[1]} to {ends[0]}: do all of them see --checkpoint?"
    # sends the weights of rank 0 to all; the view: a gradient lies in its bucket, and nothing is copied between the two
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    sampler = DistributedSampler(dataset, world, rank, seed=args.seed, drop_last=True)  # rank, rank + world, …
    steps = len(dataset) // args.batch if args.batch % world == 0 else 0  # of an epoch; the ranks share a batch
    assert steps, f"--batch {args.batch}: expected a multiple of the {world} ranks, and at most {len(dataset)} images"
    for epoch in range(step // steps, args.epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        batches = list(BatchSampler(sampler, args.batch // world, drop_last=True))[step % steps : steps]
        loader = DataLoader(dataset, None, sampler=batches, num_workers=args.workers, pin_memory=device == "cuda")
        begin, count = perf_counter(), len(batches) * args.batch
        for images, labels in ([each.to(device, non_blocking=True) for each in batch] for batch in loader):
            step += 1
            optimizer.param_groups[0]["lr"] = rate * min(1, step / max(args.warmup, 1))
            loss = nn.functional.cross_entropy(model(images / 128 - 1), labels)
            optimizer.zero_grad()
            loss.backward()  # when it returns, each gradient is the mean over all ranks
            optimizer.step()
            keep(args, rank, step, model, optimizer, loss.detach() / world, writer, writing)
            if profiler:
                profiler.step()
        if rank == 0:  # .item() waits for the device, so it comes before the time
            print(f"epoch {epoch}: loss {loss.item():.3f}, {count / (perf_counter() - begin):,.0f} images/s, {device}")
    finish(writing)  # the last one is whole


def recording(folder, rank):
    handler = tensorboard_trace_handler(str(folder), worker_name=f"rank_{rank}", use_gzip=True)
    return profile(schedule=schedule(wait=4, warmup=2, active=6, repeat=1), on_trace_ready=handler, record_shapes=True)


def keep(args, rank, step, model, optimizer, loss, writer, writing):
    if args.losses:
        dist.all_reduce(loss)  # by all ranks; to read it makes the host wait in each step: for tests only
        if rank == 0:
            print(step, loss.item(), sep=",", file=args.losses.open("a"))
    if args.checkpoint and rank == 0 and step % args.every == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if args.async_checkpoint:  # a thread writes a copy, since training goes on and changes the state
            finish(writing)  # one at a time
            writing.append(writer.submit(write, BlockingAsyncStager().stage(state), args.checkpoint))
        else:
            write(state, args.checkpoint)


def finish(writing):
    for future in writing:
        future.result()  # waits; raises what went wrong in the thread
    writing.clear()


def write(state, path):  # whole, or still the older one
    with path.with_suffix(".new").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk, before it takes the older one's place
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "--checkpoint", "--trace", "--losses"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--async-checkpoint", action="store_true", help="write in a thread while training goes on")
    defaults = {"epochs": 2, "batch": 256, "workers": 0, "every": 100, "warmup": 20, "seed": 0, "timeout": 600}
    for name, default in (defaults | {"lr": 0.05}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    (rank, world, local, here), gpus = (int(os.environ[name]) for name in names), torch.cuda.device_count()
    assert gpus == 0 or gpus >= here, f"{here} ranks but {gpus} GPUs: start fewer, or CUDA_VISIBLE_DEVICES= for the CPU"
    torch.cuda.set_device(local if gpus else -1)  # each rank has a GPU of its own, as NCCL wants it; -1: none
    gpu = torch.device("cuda", local) if gpus else None  # known to NCCL from the start: it connects at once, not later
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=args.timeout), device_id=gpu)
    with recording(args.trace, rank) if args.trace else contextlib.nullcontext() as profiler:
        main(args, rank, world, "cuda" if gpus else "cpu", profiler)
    dist.destroy_process_group()
