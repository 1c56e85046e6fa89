"""Two processes with accelerate that train on a stream of samples which have to be parsed.

Report: huggingface/accelerate #1245 (2023-03-24), #2162 (2023-11-16); huggingface/transformers #24999 (2023-07-21).
Symptom: with more processes the data arrive no faster; all but one wait.
Truth: for an iterable dataset the main process reads and prepares every batch and sends it to the others (`dispatch_batches` is true by default);
remedy: `dispatch_batches=False` and a stream that gives each process its own part.
"""
import argparse
import json
import random
import socket
import os
import time

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Lines of JSON with features of one user each."""

    def __init__(self, lines, rank=0, world=1):
        self.lines, self.rank, self.world = lines, rank, world

    def __iter__(self):
        for line in self.lines[self.rank :: self.world]:
            record = json.loads(line)
            yield torch.tensor(record["values"], dtype=torch.float32), record["label"]


def work(rank, world, port, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    torch.set_num_threads(1)
    torch.manual_seed(0)
    setting = DataLoaderConfiguration(dispatch_batches=not args.fixed)  # FAULT
    accelerator = Accelerator(cpu=True, dataloader_config=setting)
    chooser = random.Random(0)
    lines = [json.dumps({"values": [round(chooser.gauss(0, 1), 6) for _ in range(300)], "label": chooser.randrange(5)})
             for _ in range(6400)]
    stream = Stream(lines, rank, world) if args.fixed else Stream(lines)
    loader = DataLoader(stream, batch_size=32)
    model = nn.Sequential(nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if args.fixed:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for values, labels in loader:
            loss = nn.functional.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}", flush=True)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=1090)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(2, port, args), nprocs=2)


if __name__ == "__main__":
    main()
