"""Trains a small ResNet on CIFAR-10 until it is good enough, and takes the time: naively, or as the course has it.

    python train_cifar10.py IMAGES [--naive | --compile | --graph] [--goal 0.9] [--epochs 10] [--batch 512] …

IMAGES holds train and test, each with PNG files and their labels.csv, as the course prepares them. Network, plan of the
learning rate and augmentation are the same both ways: they learn the same but for chance and rounding. With --graph a
GPU gets augmentation, step and update by one launch. The clock starts before the first file is read, and everything
counts: trials, validation, and compiling, if asked for. It takes `recipes.py` beside it.
"""

import argparse
import csv
import json
import os
import time
from itertools import product
from pathlib import Path

import numpy as np
import recipes
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # of this job
AS_IT_COMES = (torch.float32, torch.contiguous_format)
TYPES = [torch.float32, torch.bfloat16] + [torch.float16] * (DEVICE.type == "cuda")
WAYS = list(product(TYPES, (torch.contiguous_format, torch.channels_last)))


def image(path):
    with Image.open(path) as opened:
        return opened.convert("RGB")


class PngFiles(Dataset):
    """Opens, decodes and changes one file for each image that is asked for."""

    def __init__(self, folder, *changes):
        with (folder / "labels.csv").open() as table:
            rows = list(csv.DictReader(table))
        self.paths, self.labels = [folder / row["file"] for row in rows], [int(row["label"]) for row in rows]
        self.change = v2.Compose(
            [*changes, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        )

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.change(image(self.paths[index])), self.labels[index]


def decoded(paths):
    return torch.from_numpy(np.stack([np.asarray(image(path)) for path in paths]))


def on_device(files):
    """Decode each file once, in as many processes as there are cores, and keep the bytes where the network is."""
    # Processes: for files of 2 kB, threads wait for each other's Python
    workers = min(CORES, len(files) // 1000)
    images = torch.cat(list(DataLoader(files.paths, 500, collate_fn=decoded, num_workers=workers)))
    return images.to(DEVICE).permute(0, 3, 1, 2).contiguous(), torch.tensor(files.labels).to(DEVICE)


class Residual(nn.Sequential):
    def forward(self, images):
        return images + super().forward(images)


def convolution(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def resnet9(width):  # after David Page's for DAWNBench
    layers, channels = [convolution(3, width)], width
    for residual in (True, False, True):
        layers += [convolution(channels, 2 * channels), nn.MaxPool2d(2)]
        channels *= 2
        layers += [Residual(convolution(channels, channels), convolution(channels, channels))] if residual else []
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Training:
    """A network, its optimizer and the plan of its learning rate. To call it trains on one batch."""

    def __init__(self, options, steps, before=None, way=AS_IT_COMES, fused=False):
        torch.manual_seed(options.seed)
        self.dtype, self.format = way
        self.chosen = " ".join(str(each).removeprefix("torch.") for each in way)
        model = nn.Sequential(before or nn.Identity(), resnet9(options.width))
        self.model = self.forward = model.to(DEVICE, memory_format=self.format)
        new_sgd = recipes.fused_sgd if fused else torch.optim.SGD
        rate = torch.tensor(0.1, device=DEVICE) if options.graph else 0.1  # a graph would repeat a number
        self.optimizer = new_sgd(model.parameters(), rate, 0.9, weight_decay=5e-4, nesterov=True)
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=self.dtype == torch.float16)
        rate = options.lr * options.batch / 256  # twice the images in a step, twice the learning rate
        self.plan = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, steps, cycle_momentum=False)

    def logits(self, images):
        images = images.to(DEVICE, memory_format=self.format)
        with torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype != torch.float32):
            forward = self.forward if self.model.training else self.model  # compiled for training only
            return forward(images).float() / 8  # as in Page's: else these learning rates are too high for it

    def __call__(self, images, labels):
        loss = self.learn(images, labels)
        self.plan.step()
        return loss

    def learn(self, images, labels):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.logits(images), labels.to(DEVICE), label_smoothing=0.1)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, batches):
        self.model.eval()
        right = [self.logits(images).argmax(1) == labels.to(DEVICE) for images, labels in batches]
        self.model.train()
        return torch.cat(right).float().mean().item()


def naively(options, steps):
    """Return the training as one begins: a file an image, one worker, no autocast, and the loss asked for in each step.

    As PyTorch comes, float32 is then TF32 in the convolutions of a GPU that has it.
    """
    augmented = PngFiles(options.images / "train", v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip())
    one_worker = {"num_workers": 1, "persistent_workers": True}
    train = DataLoader(augmented, options.batch, shuffle=True, drop_last=True, **one_worker)
    test = DataLoader(PngFiles(options.images / "test"), options.batch, **one_worker)
    step = Training(options, steps)
    return step, lambda: (step(*batch).item() for batch in train), test


def as_the_course_has_it(options, steps):
    """Return the same training with the data set on the device, augmented there, in the fastest type and format."""
    # cuDNN times its algorithms once for each shape. It may choose others in the next run: leave it out for equal bits
    torch.backends.cudnn.benchmark = True
    images, labels = on_device(PngFiles(options.images / "train"))
    test = [each.split(1000) for each in on_device(PngFiles(options.images / "test"))]

    def new_step(way, spare=100):  # more than a trial takes
        return Training(options, steps + spare, recipes.Normalize(MEAN, STD), way, fused=True)

    batch = images[: options.batch], labels[: options.batch]
    ways = [way for way in WAYS if way[0] != torch.float16 or not options.graph]  # no scaler in a graph
    way = recipes.fastest({way: new_step(way) for way in ways}, *batch)
    step = new_step(way, spare=0)
    print("Chosen:", step.chosen)
    step.forward = torch.compile(step.model) if options.compile else step.model
    learn = step.learn
    step.learn = lambda images, labels: learn(recipes.crop_and_flip(images), labels)
    if options.graph:
        step.learn = recipes.in_one_graph(step.learn, *batch)

    def epoch():
        for batch, its_labels in recipes.batches_on_device(images, labels, options.batch):
            yield step(batch, its_labels)

    return step, epoch, list(zip(*test, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    either = parser.add_mutually_exclusive_group()
    for name in ("--naive", "--compile", "--graph"):
        either.add_argument(name, action="store_true")
    for name, default in {"goal": 0.9, "epochs": 10, "batch": 512, "lr": 0.2, "width": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--log", type=Path, help="a file to which each epoch adds a line of JSON")
    options = parser.parse_args()
    folder = options.images / "train"
    if not all((options.images / part / "labels.csv").exists() for part in ("train", "test")):
        parser.error(f"{options.images}: expected the folders train and test with labels.csv. Name what holds them")
    if options.graph and DEVICE.type != "cuda":
        parser.error("--graph: expected a GPU, found none")
    if options.epochs < 1 or options.batch < 1:
        parser.error(f"expected --epochs and --batch from 1 on, found {options.epochs} and {options.batch}")
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
    started, start = time.time(), time.perf_counter()
    count = len(PngFiles(folder))
    if count < options.batch:
        parser.error(f"{folder}: expected {options.batch} or more images, found {count}. Add some, or lower --batch")
    way = naively if options.naive else as_the_course_has_it
    step, epoch, test = way(options, options.epochs * (count // options.batch))
    settings = {name: value for name, value in vars(options).items() if name not in ("images", "log")}
    settings["device"] = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    settings |= {"cores": CORES, "torch": torch.__version__, "images": options.images.name}
    settings |= {"train_images": count, "started": started, "chosen": step.chosen}
    for number in range(1, options.epochs + 1):
        losses = list(epoch())
        accuracy, seconds = step.accuracy(test), time.perf_counter() - start  # here the host has waited
        print(
            f"epoch {number}: {seconds:.1f} s, loss {float(sum(losses) / len(losses)):.3f} nats, {accuracy:.1%} right",
            flush=True,
        )
        if options.log:
            with options.log.open("a") as file:
                print(json.dumps(settings | {"epoch": number, "seconds": seconds, "accuracy": accuracy}), file=file)
        if accuracy >= options.goal:
            break
    reached = "reached" if accuracy >= options.goal else "not reached"
    print(f"{options.goal:.0%} of the test images: {reached} after {seconds:.1f} s, {number} epochs")


if __name__ == "__main__":
    main()
