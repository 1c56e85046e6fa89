"""Trains ResNet-50 on photos of your own with what the course found. It takes `recipes.py` beside it, no more.

    python train_photos.py PHOTOS PACKED [--epochs 10] [--batch 64] [--lr 0.1] [--workers 0 1 2 4 8] [--compile]

PHOTOS holds train/CLASS/*.jpg and val/CLASS/*.jpg; or CLASS/*.jpg, and about every tenth photo is kept to validate.
PACKED, on a fast disk, is filled once, and again if photos have changed, with 196 kB for each photo; damaged ones are
left out. After each epoch it gets a checkpoint: the same command goes on from there. --lr is for 256 images a step.
"""

import argparse
import itertools
import math
import os
import time
import zlib
from functools import partial
from pathlib import Path

import recipes
import torch
import torchvision
from torch import nn
from torch.utils.data import Subset

STORED, SIDE, SEED = 256, 224, 2021  # pixels of a packed photo, pixels of what is cut out of it, any number
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # of this job
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {"": torch.contiguous_format, ", channels_last": torch.channels_last}
WAYS = {
    name + layout: (TYPES[name], FORMATS[layout])
    for name, layout in itertools.product(TYPES, FORMATS)
    if name != "float16" or DEVICE.type == "cuda"  # many processors take minutes in float16
}


def find(photos):
    """Return the paths of the photos to train on, and of those to validate with."""

    def within(folder):
        return sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))

    if (photos / "train").is_dir():
        return within(photos / "train"), within(photos / "val")
    parts = [], []
    for path in within(photos):
        parts[recipes.held_out(path)].append(path)
    return parts


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
        def middle(images):
            crop = slice((STORED - SIDE) // 2, (STORED + SIDE) // 2)
            return images[:, :, crop, crop].contiguous(memory_format=self.format)

        with self.autocast():
            return recipes.accuracy(self.model, loader, DEVICE, middle)

    def state(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "plan", "scaler")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("packed", type=Path)
    for name, default in (("--epochs", 10), ("--batch", 64), ("--lr", 0.1)):
        parser.add_argument(name, type=type(default), default=default)
    few = [number for number in (0, 1, 2, 4, 8) if number <= CORES]
    few = few if DEVICE.type == "cuda" else [1]  # a CPU's step takes seconds: enough for one worker
    parser.add_argument("--workers", type=int, nargs="+", default=few, help="to try; one is taken as it is")
    parser.add_argument("--compile", action="store_true", help="the first step then takes a minute or more")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32, where there is a GPU that has it
    options.packed.mkdir(parents=True, exist_ok=True)
    parts = dict(zip(("train", "val"), find(options.photos), strict=True))
    classes = sorted({path.parent.name for path in parts["train"]})
    if others := {path.parent.name for path in parts["val"]} - set(classes):
        parser.error(f"val: expected the classes of train, found others: {sorted(others)}. Rename them")

    def expect(part, found):
        least = options.batch if part == "train" else 1
        if found < least:
            parser.error(f"{part}: expected {least} or more photos, found {found}. Add some, or lower --batch")

    for part, paths in parts.items():
        expect(part, len(paths))
    data = {}
    for part, paths in parts.items():
        packed = options.packed / f"{part}.npy"
        rows = recipes.pack_photos(paths, STORED, packed, CORES)
        expect(part, len(rows))
        data[part] = Subset(recipes.Packed(packed, [classes.index(path.parent.name) for path in paths]), rows)

    def loader(workers, part="train"):
        if part == "train":
            return recipes.loader_that_resumes(data[part], options.batch, workers, SEED, collate_fn=recipes.as_it_is)
        return recipes.loader_of(data[part], options.batch, workers, train=False, collate_fn=recipes.as_it_is)

    steps = options.epochs * (len(data["train"]) // options.batch)

    def new_training(way):
        return Training(len(classes), options.lr * options.batch / 256, steps, way)

    checkpoint = options.packed / "checkpoint.pt"
    settings = {name: getattr(options, name) for name in ("epochs", "batch", "lr")}
    settings |= {"classes": classes} | {part: len(usable) for part, usable in data.items()}
    names = [[path.parent.name, path.name] for paths in parts.values() for path in paths]
    settings["checksum of all names"] = zlib.crc32(str(names).encode(errors="surrogateescape"))
    kept = recipes.load_whole(checkpoint) if checkpoint.exists() else {"settings": settings, "epoch": 0}
    if kept["settings"] != settings:
        parser.error(f"{checkpoint}: expected {kept['settings']}, found {settings}. Delete it to begin anew")
    if "way" not in kept:
        print("Trying number types and memory formats, then workers: seconds on a GPU, minutes on a CPU", flush=True)
        trials, images = {way: new_training(way) for way in WAYS}, next(iter(loader(0)))
        kept["way"] = recipes.fastest(trials, *images)
        some = options.workers
        kept["workers"] = some[0]
        if some[1:]:
            ahead = partial(recipes.one_ahead, device=DEVICE)
            kept["workers"] = recipes.best_workers(loader, trials[kept["way"]], some, ahead=ahead)
        recipes.save_whole(checkpoint, kept)
        del trials
    training = new_training(kept["way"])  # anew: the trials have trained theirs
    for name in training.state().keys() & kept.keys():
        getattr(training, name).load_state_dict(kept[name])
    training.forward = torch.compile(training.model) if options.compile else training.model
    print(f"From epoch {kept['epoch']} on: {kept['way']}, {kept['workers']} workers", flush=True)
    train, val = loader(kept["workers"]), loader(kept["workers"], "val")
    for epoch in range(kept["epoch"], options.epochs):
        train.sampler.set_epoch(epoch)
        torch.manual_seed(SEED + epoch)  # for crops and flips: the same whether or not the run was stopped before
        start = time.perf_counter()
        loss = recipes.train(train, training, DEVICE)
        speed = len(train) * options.batch / (time.perf_counter() - start)
        print(
            f"epoch {epoch}: loss {loss:.3f} nats, {speed:.0f} images/s, {training.accuracy(val):.1%} right", flush=True
        )
        recipes.save_whole(checkpoint, kept | training.state() | {"epoch": epoch + 1})
    batches = recipes.one_ahead(recipes.endless(train), DEVICE)
    recipes.record(batches, training, options.packed / "trace")  # last: a profiler may leave something attached


if __name__ == "__main__":
    main()
