"""The rungs of the ladder, each defined once: by these definitions `record` times them, and the notebooks' own loaders
and steps are compared with them (``tests/notebooks``).

A rung differs from the one that it is compared with in what its notebook changes, and in nothing else that takes time:
the learning rate is each notebook's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.transforms import v2

from helpers import config, simulate, timing, training
from helpers.data import cifar10, photos, stores
from helpers.loading import datasets, resident, resizing
from helpers.results.recording import Group, Rung
from helpers.training import compiling, models, precision

_BATCH, _PHOTOS = 128, 32  # images in a batch
_SIZE, _CROP = 256, 224  # pixels
_OBJECTS = 1_024  # images that are written as objects of their own

_NORMALIZED = transforms.Compose([transforms.ToTensor(), transforms.Normalize(cifar10.MEAN, cifar10.STD)])
_BYTES = transforms.PILToTensor()
_AUGMENTED = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
_CROPPED = v2.Compose([v2.RandomCrop(_CROP), v2.RandomHorizontalFlip(), v2.PILToTensor()])
_RESIZED_AND_CROPPED = v2.Compose([v2.Resize(_SIZE), _CROPPED])


# Notebooks 01 to 07, with CIFAR-10: how the small network is fed


def loading_rungs(data: cifar10.Prepared, workers: int) -> tuple[Rung, ...]:
    """Return the rungs of notebooks 01, 03, 04 and 06.

    Parameters
    ----------
    data : cifar10.Prepared
    workers : int
        As many as notebook 03 finds best; 04 keeps at least one of them.
    """
    from helpers.loading import formats, packs  # here, since they need a package that computes checksums

    plain, normalizing = (training.accelerator_step(models.SmallCNN(normalize=each)) for each in (False, True))
    pack = packs.prepare(data)
    in_batches = DataLoader(pack, batch_sampler=formats.ShuffledBatches(len(pack), _BATCH), collate_fn=pack.collate)
    return (
        Rung("01 naive PNG files", _png_files(data, _NORMALIZED, 1), plain),
        Rung("03 more workers", _png_files(data, _NORMALIZED, workers), plain, "01 naive PNG files"),
        Rung("04 normalize on the device", _png_files(data, _BYTES, workers or 1), normalizing, "03 more workers"),
        Rung("06 packed in one file", in_batches, normalizing, "04 normalize on the device"),
    )


def augmenting_rungs(data: cifar10.Prepared, workers: int) -> tuple[Rung, ...]:
    """Return the rungs of notebook 07; one of them has its images on the device at once. Parameters as above."""
    from helpers.loading import formats, packs

    workers, on_gpu, pack = workers or 1, config.device().type == "cuda", packs.prepare(data)
    by_item = DataLoader(datasets.Transformed(pack, _AUGMENTED), _BATCH, True, num_workers=workers, pin_memory=on_gpu)
    batches = formats.ShuffledBatches(len(pack), _BATCH)
    in_batches = DataLoader(pack, batch_sampler=batches, collate_fn=pack.collate, pin_memory=on_gpu)
    images, labels = (each.to(config.device()) for each in pack.collate(pack.__getitems__(range(len(pack)))))
    resident_images = resident.OnDevice(images, labels, _BATCH)
    step = training.accelerator_step(models.SmallCNN(normalize=True))
    augmenting = training.Augmented(step, training.crop_and_flip)
    return (
        Rung("07 augmented image by image", by_item, step),
        Rung("07 augmented on the device", in_batches, augmenting, "07 augmented image by image"),
        Rung("07 data set on the device", resident_images, augmenting, "07 augmented on the device"),
    )


def loading() -> Group:
    """Prepare notebooks 01 to 07, with CIFAR-10."""
    data, preset = cifar10.prepare(), config.preset()
    workers = _best_workers(data)
    return Group(loading_rungs(data, workers) + augmenting_rungs(data, workers), data.source, preset.steps)


def _png_files(data: cifar10.Prepared, transform: object, workers: int) -> DataLoader:
    return DataLoader(datasets.PngDataset(data.train, transform), _BATCH, shuffle=True, num_workers=workers)


def _best_workers(data: cifar10.Prepared) -> int:
    """Time each number of workers that notebook 03 sweeps, once, and return the fastest."""
    preset, cores = config.preset(), min(config.cores(), 32)
    counts = sorted({*preset.worker_counts, max(cores - 1, 1), cores})
    step = training.accelerator_step(models.SmallCNN())
    rates = {
        count: timing.loop(_png_files(data, _NORMALIZED, count), step, preset.steps).images_per_second
        for count in counts
        if count <= 2 * cores
    }
    return max(rates, key=rates.get)


# Notebook 05, with photos: resized in every epoch, or once


def photo_rungs(data: photos.Prepared, copies: Path) -> tuple[Rung, ...]:
    """Return the rungs of notebook 05.

    Parameters
    ----------
    data : photos.Prepared
    copies : Path
        Folder of the same photos, resized ahead to 256 pixels.
    """
    if config.device().type == "cuda":
        network = torchvision.models.resnet50(num_classes=len(data.classes))
        network.conv1 = nn.Sequential(models.Normalize(), network.conv1)
        step = training.accelerator_step(network)
    else:
        step = simulate.SimulatedAccelerator(20)
    return (
        Rung("05 photos as they are", _jpeg_files(data.folder, _RESIZED_AND_CROPPED), step),
        Rung("05 photos resized ahead", _jpeg_files(copies, _CROPPED), step, "05 photos as they are"),
    )


def preprocessing() -> Group:
    """Prepare notebook 05, with photos."""
    data = photos.prepare()
    copies = resizing.resize_ahead(data.folder, config.runs_dir() / f"photos-{_SIZE}", _SIZE)
    return Group(photo_rungs(data, copies.folder), data.source, config.preset().steps)


def _jpeg_files(folder: Path, transform: object) -> DataLoader:
    images = datasets.JpegDataset(folder, transform)
    order = RandomSampler(images, num_samples=100 * len(images))  # epoch after epoch, without a pause
    return DataLoader(images, _PHOTOS, sampler=order, num_workers=1)


# Notebooks 08 to 11, with CIFAR-10: how a step of ResNet-50 becomes faster


@dataclass(frozen=True)
class ResNet:
    """What makes a rung of notebooks 08 to 11 what it is.

    Attributes
    ----------
    baseline : str or None
        The rung that it is compared with, where that could be timed, or else what stands in for it: see `resnet`.
    lr : float
        Learning rate of the optimizer, which is SGD.
    tf32 : bool
        Whether float32 is rounded to TF32 in products, where there is TF32.
    weights, images : torch.memory_format
    autocast : torch.dtype or None
    fused : bool or None
        The optimizer. None lets PyTorch choose, which takes its foreach operators on a GPU; False takes a Python loop.
    compiled : bool
        The network, on a GPU into CUDA graphs.
    """

    baseline: str | None
    lr: float = 0.01
    tf32: bool = True
    weights: torch.memory_format = torch.channels_last
    images: torch.memory_format = torch.channels_last
    autocast: torch.dtype | None = None
    fused: bool | None = None
    compiled: bool = False


_AS_IT_COMES = {"weights": torch.contiguous_format, "images": torch.preserve_format}
RESNET = {
    "08 ResNet-50": ResNet(None, lr=0.001, tf32=False, **_AS_IT_COMES),
    "08 with TF32": ResNet("08 ResNet-50", lr=0.001, **_AS_IT_COMES),
    "09 channels_last": ResNet("08 with TF32", lr=0.001),
    "10 mixed precision": ResNet("09 channels_last", tf32=False, autocast=torch.bfloat16),
    "11 fused optimizer": ResNet("10 mixed precision", fused=True, autocast=torch.bfloat16),
    "11 fewer launches": ResNet("10 mixed precision", fused=True, autocast=torch.bfloat16, compiled=True),
}
"""The rungs of ResNet-50 by name. 11 trains in bfloat16 only where 10 was faster with it."""


def resnet_rung(name: str, data: cifar10.Prepared, definition: ResNet) -> Rung:
    """Return a rung of notebooks 08 to 11 with a new network. What it compiles is compiled in its first step."""
    from helpers.loading import packs  # here, since it needs a package that computes checksums

    workload = training.resnet_workload()
    training.seed_everything(config.SEED)
    model = models.resnet50(workload.side).to(config.device(), memory_format=definition.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=definition.lr, fused=definition.fused)
    step = training.TrainingStep(
        _compiled(model) if definition.compiled else model,
        optimizer,
        autocast=definition.autocast,
        memory_format=definition.images,
    )
    loader = packs.loader(packs.prepare(data), workload.batch)
    tf32 = definition.tf32 and torch.cuda.is_tf32_supported()
    return Rung(name, loader, training.WithTF32(step, tf32), definition.baseline)


def _compiled(model: nn.Module) -> nn.Module:
    """Let `torch.compile` have a network, on a GPU into CUDA graphs; with the preset ci on a CPU one block of it."""
    if config.device().type == "cuda":
        return torch.compile(model, mode="reduce-overhead")
    if config.preset().name != "ci":
        return torch.compile(model)
    blocks = model[-1].layer4
    blocks[-1] = torch.compile(blocks[-1])
    return model


def resnet() -> Group:
    """Prepare notebooks 08 to 11, with CIFAR-10, as far as this machine has and can do what they need."""
    data = cifar10.prepare()

    def rung(name: str, **changes: object) -> Rung:
        return resnet_rung(name, data, replace(RESNET[name], **changes))

    rungs, left_out = [rung("08 ResNet-50")], []
    if torch.cuda.is_tf32_supported():
        rungs.append(rung("08 with TF32"))
    rungs.append(rung("09 channels_last", baseline=rungs[-1].name))
    usual, mixed, batch = rungs[-1], rung("10 mixed precision"), next(iter(rungs[-1].loader))
    # It is timed only where it is fast enough, and stays in 11 only where it costs less than it gains
    trial = _try(mixed, usual, batch)
    if trial.fast_enough:
        rungs.append(mixed)
    else:
        left_out.append(f"{mixed.name}: {trial}")
    kept = {} if trial.faster else {"autocast": None, "baseline": usual.name}
    rungs.append(rung("11 fused optimizer", **kept))
    compiled = rung("11 fewer launches", **kept)
    try:
        compiling.first_step(compiled.step, *batch)
        rungs.append(compiled)
    except compiling.CannotCompile as reason:
        left_out.append(f"{compiled.name}: {reason}")
    return Group(tuple(rungs), data.source, config.preset().steps, tuple(left_out))


def _try(mixed: Rung, usual: Rung, batch: tuple[torch.Tensor, torch.Tensor]) -> precision.Trial:
    usual_ms = min(timing.each_call_ms(lambda: usual.step(*batch), repeats=3))
    return precision.try_step(mixed.step, batch, usual_ms, "TF32" if usual.step.enabled else "float32")


# Notebook 12, from an object store that is far away: an object an image, or shards


def streaming_rungs(data: cifar10.Prepared, near: object, far: object) -> tuple[Rung, ...]:
    """Return the rungs of notebook 12; the images are written to the store.

    Parameters
    ----------
    data : cifar10.Prepared
    near, far : stores.Bucket, stores.Folder or simulate.SlowStore
        The same store, to write to and to read from.
    """
    from helpers.loading import shards  # here, since it needs packages for stores and checksums

    files, store = datasets.PngDataset(data.train), near.connect()
    count = min(len(files), config.preset().train_images)
    pngs = [(data.train / name.decode()).read_bytes() for name in files.files[:count]]
    names = [f"course-12/images/{number:09d}.png" for number in range(min(count, _OBJECTS))]
    for name, png in zip(names, pngs, strict=False):
        store.put(name, png)
    samples = [
        {"png": png, "cls": str(label).encode()} for png, label in zip(pngs, files.labels[:count].tolist(), strict=True)
    ]
    index = shards.pack(samples, store, "course-12/packed/", shard_bytes=1e6, piece_bytes=1.2e5)
    objects = datasets.ImageObjects(far, names, files.labels.tolist(), threads=16)
    stream = shards.ShardStream(
        far, index, _BATCH, datasets.image_and_label, prefix="course-12/packed/", seed=config.SEED, threads=16
    )
    step = training.accelerator_step(models.SmallCNN(normalize=True))
    return (
        Rung("12 an object an image", DataLoader(objects, _BATCH, shuffle=True), step),
        Rung("12 streamed from shards", DataLoader(stream, batch_size=None), step, "12 an object an image"),
    )


def streaming() -> Group:
    """Prepare notebook 12: a store on this machine, behind a simulated link."""
    data, preset = cifar10.prepare(), config.preset()
    near, server = stores.course_store(config.runs_dir() / "objects")
    far, link = simulate.far_away(near, first_byte_ms=30, mb_per_s=25)
    epoch = min(preset.train_images, len(datasets.PngDataset(data.train))) // _BATCH  # less, and what ran ahead counts
    return Group(streaming_rungs(data, near, far), f"{data.source}, {link}", epoch, kept=(server, link))


OF_RANKS = ("13 exchange after backward", "13 exchange beside backward")
"""The rungs of notebook 13. The ranks of a job time them, and `record` starts none, so no reference has them."""

GROUPS = (loading, preprocessing, resnet, streaming)
