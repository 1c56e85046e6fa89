"""Trains ResNet-50 on photos of your own with what the course found. It takes `recipes.py` beside it, no more.

    python train_photos.py PHOTOS PACKED [--epochs 10] [--batch 64] [--lr 0.1] [--workers 0 1 2 4 8] [--compile [MODE]]
    torchrun --nproc-per-node 4 train_photos.py PHOTOS PACKED …    # on four GPUs; on several machines: slurm/README.md

PHOTOS holds train/CLASS/*.jpg and val/CLASS/*.jpg; or CLASS/*.jpg, and about every tenth photo is kept to validate.
PACKED, on a fast disk that all ranks see, is filled once, and again if photos have changed, with 196 kB for each photo;
damaged ones are left out. After each epoch it gets a checkpoint: the same command goes on from there. --batch is of all
ranks together, and --lr is for 256 images a step.
"""

import argparse
import copy
import itertools
import math
import os
import time
import zlib
from functools import partial
from pathlib import Path

import recipes
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import Subset

STORED, SIDE, SEED = 256, 224, 2021  # pixels of a packed photo, pixels of what is cut out of it, any number
DEVICE = recipes.join()  # of this rank
RANK, RANKS = recipes.rank_and_ranks()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # of this job
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {"": torch.contiguous_format, ", channels_last": torch.channels_last}
WAYS = {
    name + layout: (TYPES[name], FORMATS[layout])
    for name, layout in itertools.product(TYPES, FORMATS)
    if name != "float16" or DEVICE.type == "cuda"  # many processors take minutes in float16
}


class Training:
    """A network, its optimizer and its learning rate. To call it trains on one batch; nothing in it waits."""

    def __init__(self, classes, rate, steps, way):
        torch.manual_seed(SEED)
        self.dtype, self.format = WAYS[way]
        normalize = recipes.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # ImageNet's; or those of yours
        model = nn.Sequential(normalize, torchvision.models.resnet50(num_classes=classes, zero_init_residual=True))
        self.model = self.forward = model.to(DEVICE, memory_format=self.format)
        self.optimizer = recipes.fused_sgd(model.parameters(), rate, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=self.dtype == torch.float16)

        def share_of_rate(step):  # up in the first twentieth of the steps, then down as a cosine
            return min(20 * (step + 1) / steps, (1 + math.cos(math.pi * step / steps)) / 2)

        self.plan = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share_of_rate)

    def autocast(self):
        return torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype != torch.float32)

    def __call__(self, images, labels):
        images = recipes.crop_and_flip(images.to(DEVICE, non_blocking=True), SIDE)
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.forward(images.contiguous(memory_format=self.format))
        loss = nn.functional.cross_entropy(logits.float(), labels.to(DEVICE, non_blocking=True))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.plan.step()
        return loss.detach()

    def accuracy(self, loader):
        crop = slice((STORED - SIDE) // 2, (STORED + SIDE) // 2)

        def right(images, labels):
            middle = images[:, :, crop, crop].contiguous(memory_format=self.format)
            return self.model(middle).argmax(1) == labels

        with self.autocast():
            return recipes.accuracy(self.model, loader, DEVICE, right)

    def state(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "plan", "scaler")}


def searching(step, search):
    """Return a step with or without cuDNN's search, which times its algorithms once for each shape.

    It may choose others in the next run: leave it out for equal bits.
    """

    def with_it(*batch):
        torch.backends.cudnn.benchmark = search
        return step(*batch)

    return with_it


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("packed", type=Path)
    for name, default in (("--epochs", 10), ("--batch", 64), ("--lr", 0.1)):
        parser.add_argument(name, type=type(default), default=default)
    its_cores = CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of each rank
    few = [number for number in (0, 1, 2, 4, 8) if number <= its_cores]
    few = few if DEVICE.type == "cuda" else [1]  # a CPU's step takes seconds: enough for one worker
    parser.add_argument("--way", choices=WAYS, help="number type and memory format; default: the fastest")
    parser.add_argument("--workers", type=int, nargs="+", default=few, help="to try; one is taken as it is")
    modes = ("default", "reduce-overhead", "max-autotune")  # fewer kernels; and in CUDA graphs; and the fastest of many
    help_ = "the first step then takes a minute or more"
    parser.add_argument("--compile", nargs="?", const=modes[0], choices=modes, help=help_)
    parser.add_argument("--checkpoint", type=Path, help="default: PACKED/checkpoint.pt")
    parser.add_argument("--trace", type=Path, help="default: PACKED/trace")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32, where there is a GPU that has it
    options.packed.mkdir(parents=True, exist_ok=True)
    found = recipes.train_and_val(options.photos, (".jpg", ".jpeg", ".png"))
    parts = dict(zip(("train", "val"), found, strict=True))
    classes = sorted({path.parent.name for path in parts["train"]})
    if options.batch % RANKS:
        parser.error(f"--batch: expected a multiple of the {RANKS} ranks, found {options.batch}")
    if others := {path.parent.name for path in parts["val"]} - set(classes):
        parser.error(f"val: expected the classes of train, found others: {sorted(others)}. Rename them")

    def expect(part, found):
        least = options.batch if part == "train" else 1
        if found < least:
            parser.error(f"{part}: expected {least} or more photos, found {found}. Add some, or lower --batch")

    for part, paths in parts.items():
        expect(part, len(paths))
    data, usable = {}, {}
    for part, paths in parts.items():
        packed = options.packed / f"{part}.npy"
        rows = recipes.decided_once(partial(recipes.pack_photos, paths, STORED, packed, CORES))
        expect(part, len(rows))
        usable[part], dataset = len(rows), recipes.Packed(packed, [classes.index(path.parent.name) for path in paths])
        data[part] = Subset(dataset, rows if part == "train" else rows[RANK::RANKS])  # each photo on one rank

    def loader(workers, part="train"):
        batch, whole = options.batch // RANKS, {"collate_fn": recipes.as_it_is}
        if part == "train":  # of all ranks together the same photos in each step, however many ranks there are
            return recipes.loader_that_resumes(data[part], batch, workers, SEED, **whole)
        return recipes.loader_of(data[part], batch, workers, train=False, **whole)

    steps = options.epochs * (usable["train"] // options.batch)

    def new_training(way):
        return Training(len(classes), options.lr * options.batch / 256, steps, way)

    checkpoint = options.checkpoint or options.packed / "checkpoint.pt"
    settings = {name: getattr(options, name) for name in ("epochs", "batch", "lr")}
    settings |= {"classes": classes} | usable
    names = [[path.parent.name, path.name] for paths in parts.values() for path in paths]
    settings["checksum of all names"] = zlib.crc32(str(names).encode(errors="surrogateescape"))

    def decide():
        print("Trying number types and memory formats, then workers: seconds on a GPU, minutes on a CPU", flush=True)
        some_ways = [options.way] if options.way else WAYS
        trials, images = {way: new_training(way) for way in some_ways}, next(iter(loader(0)))
        way, some = recipes.fastest(trials, *images), options.workers
        searches = {search: searching(trials[way], search) for search in (False, True)}
        search = recipes.fastest(searches, *images) if DEVICE.type == "cuda" else False
        ahead = partial(recipes.one_ahead, device=DEVICE)
        workers = recipes.best_workers(loader, trials[way], some, ahead=ahead) if some[1:] else some[0]
        return {"way": way, "workers": workers, "search": search}

    # By one rank, for all
    kept = recipes.decided_once(partial(recipes.where_to_begin, checkpoint, settings, decide))
    if options.way not in (None, kept["way"]):
        parser.error(f"--way: expected {kept['way']}, with which {checkpoint} began, found {options.way}")
    if len(options.workers) == 1:  # another number of them learns the same
        kept["workers"] = options.workers[0]
    torch.backends.cudnn.benchmark = kept["search"]
    training = new_training(kept["way"])  # anew: the trials have trained theirs
    kept = copy.deepcopy(training.state()) | kept
    training.forward = recipes.data_parallel(training.model)
    if options.compile:
        training.forward = torch.compile(training.forward, mode=options.compile)
    if RANKS > 1:
        training(*next(iter(loader(0))))  # in which DDP lays out its buckets; what it learned goes
    for name in training.state():
        getattr(training, name).load_state_dict(kept[name])
    if RANK == 0:
        print(f"From epoch {kept['epoch']} on: {kept['way']}, {kept['workers']} workers, {RANKS} ranks", flush=True)
    train, val = loader(kept["workers"]), loader(kept["workers"], "val")
    for epoch in range(kept["epoch"], options.epochs):
        train.sampler.set_epoch(epoch)
        # For crops and flips: the same whether or not the run was stopped before, and others on each rank
        torch.manual_seed(SEED + epoch * RANKS + RANK)
        start = time.perf_counter()
        loss = recipes.train(train, training, DEVICE)
        speed = len(train) * options.batch / (time.perf_counter() - start)
        recipes.same_buffers(training.model)
        right = training.accuracy(val)
        if RANK == 0:
            recipes.save_whole(checkpoint, kept | training.state() | {"epoch": epoch + 1})
            print(f"epoch {epoch}: loss {loss:.3f} nats, {speed:.0f} images/s, {right:.1%} right", flush=True)
    batches = recipes.one_ahead(recipes.endless(train), DEVICE)
    if kept["epoch"] < options.epochs:  # else all is done already, and so is the trace
        # Last: a profiler may leave something attached
        active = recipes.whole_periods(6, kept["workers"])
        recipes.record(batches, training, options.trace or options.packed / "trace", active)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
