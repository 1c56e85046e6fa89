"""Trains ResNet-50 on photos of your own with all that the course found. It takes `recipes.py` beside it, no more.

    python train_photos.py PHOTOS PACKED [--epochs 10] [--batch 64] [--lr 0.05] [--workers 0 1 2 4]

PHOTOS holds train/CLASS/*.jpg and val/CLASS/*.jpg. PACKED, on a fast disk, is filled once, with 196 kB for each photo.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import recipes
import torch
import torchvision
from torch import nn

STORED, SIDE, SEED = 256, 224, 2021  # pixels of a packed photo, pixels of what is cut out of it, any number
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pack(paths, labels, packed):
    """Decode and resize each photo once, on all cores, into one file that is an array."""
    started = packed.with_suffix(".started")
    images = np.lib.format.open_memmap(started, "w+", np.uint8, (len(paths), 3, STORED, STORED))

    def place(number):
        try:
            images[number] = np.asarray(recipes.resize(paths[number], STORED)).transpose(2, 0, 1)
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow reports damage
            raise OSError(f"{paths[number]}: expected a photo, but: {error}. Remove or replace it") from error

    with ThreadPoolExecutor() as threads:
        list(threads.map(place, range(len(paths))))
    images.flush()
    np.save(packed.with_suffix(".labels.npy"), labels)
    started.rename(packed)  # so that a run that was killed leaves no half of a pack under this name


class Photos(recipes.Packed):
    """Reads a batch at once; each image is cut, and in training flipped, by chances of its own."""

    def __init__(self, path, training):
        super().__init__(path, np.load(path.with_suffix(".labels.npy")))
        self.training = training

    def __getitems__(self, indices):
        images = np.load(self.path, mmap_mode="r")
        corners, flips = torch.full((len(indices), 2), (STORED - SIDE) // 2), torch.zeros(len(indices), dtype=bool)
        if self.training:
            corners, flips = torch.randint(STORED - SIDE + 1, corners.shape), torch.rand(len(flips)) < 0.5
        batch = np.empty((len(indices), 3, SIDE, SIDE), np.uint8)
        for image, index, (top, left), flip in zip(batch, indices, corners.tolist(), flips.tolist(), strict=True):
            cut = images[index, :, top : top + SIDE, left : left + SIDE]
            image[:] = cut[:, :, ::-1] if flip else cut
        return torch.from_numpy(batch), self.labels[indices]


class Training:
    """A network and its optimizer. To call it trains on one batch; nothing in it waits for the device."""

    def __init__(self, classes, lr, name):
        torch.manual_seed(SEED)
        normalize = recipes.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # ImageNet's; or those of yours
        self.model = nn.Sequential(normalize, torchvision.models.resnet50(num_classes=classes, zero_init_residual=True))
        self.model.to(DEVICE, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9, weight_decay=1e-4, fused=True)
        self.mixed = name == "bfloat16"

    def logits(self, images):
        images = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.mixed):
            return self.model(images)

    def __call__(self, images, labels):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.logits(images).float(), labels.to(DEVICE, non_blocking=True))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, loader):
        self.model.eval()
        right = [(self.logits(images).argmax(1) == labels.to(DEVICE)).float() for images, labels in loader]
        self.model.train()
        return torch.cat(right).mean().item()


def faster_type(types, batch):
    """Return the name of the type in which a step takes least, timed in turns."""
    few = [each[:2] for each in batch]  # some processors take a hundred times as long in bfloat16: ask with two images
    first = {name: recipes.milliseconds(lambda: step(*few), repeats=1, warmup=1) for name, step in types.items()}
    if first["bfloat16"] > 3 * first["float32"]:
        return "float32"
    return recipes.fastest({name: lambda step=step: step(*batch) for name, step in types.items()})


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("packed", type=Path)
    for name, default in (("--epochs", 10), ("--batch", 64), ("--lr", 0.05)):
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4], help="to try; one is taken as it is")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32, where there is a GPU that has it
    options.packed.mkdir(parents=True, exist_ok=True)
    classes = sorted(folder.name for folder in (options.photos / "train").iterdir() if folder.is_dir())
    data = {}
    for part, least in (("train", options.batch), ("val", 1)):
        packed, folder = options.packed / f"{part}.npy", options.photos / part
        paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        found = len(np.load(packed, mmap_mode="r")) if packed.exists() else len(paths)
        if others := {path.parent.name for path in paths} - set(classes):
            parser.error(f"{folder}: expected the classes of train, found others: {sorted(others)}. Rename them")
        if found < least:
            parser.error(f"{folder}: expected {least} or more photos, found {found}. Add some, or lower --batch")
        if not packed.exists():
            pack(paths, [classes.index(path.parent.name) for path in paths], packed)
        data[part] = Photos(packed, training=part == "train")

    def loader(workers, part="train"):
        return recipes.loader_of(data[part], options.batch, workers, part == "train", collate_fn=recipes.as_it_is)

    types = {name: Training(len(classes), options.lr, name) for name in ("float32", "bfloat16")}
    name = faster_type(types, next(iter(loader(0))))
    workers = recipes.best_workers(loader, types[name], options.workers) if options.workers[1:] else options.workers[0]
    print(f"From here on: {name}, {workers} workers")
    train, val = loader(workers), loader(workers, "val")
    step = Training(len(classes), options.lr, name)  # anew: the trials have trained theirs
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, options.epochs)
    for epoch in range(options.epochs):
        start = time.perf_counter()
        losses = torch.stack([step(images, labels) for images, labels in train]).cpu()  # the host waits here, once
        speed = len(losses) * options.batch / (time.perf_counter() - start)
        print(f"epoch {epoch}: loss {losses.mean():.3f} nats, {speed:.0f} images/s, {step.accuracy(val):.1%} right")
        plan.step()
    torch.save(step.model.state_dict(), options.packed / "model.pt")
    recipes.record(train, step, options.packed / "trace")  # last: a profiler may leave something attached


if __name__ == "__main__":
    main()
