"""The rungs of the ladder as the notebooks time them, for `record`: each function prepares those of one workload."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.transforms import v2

from helpers import config, simulate, timing, training
from helpers.data import cifar10, photos
from helpers.loading import datasets, resizing
from helpers.results.recording import Group, Rung
from helpers.training import compiling, models, precision

_BATCH = 128
_SIZE, _CROP, _PHOTOS = 256, 224, 32  # pixels, pixels, photos in a mini-batch: as in notebook 05


def loading() -> Group:
    """Notebooks 01 to 06, with CIFAR-10: how the small network is fed."""
    from helpers.loading import packs  # needs a package that computes checksums

    data, preset = cifar10.prepare(), config.preset()
    plain, normalizing = (training.accelerator_step(models.SmallCNN(normalize=each)) for each in (False, True))
    normalize = transforms.Compose([transforms.ToTensor(), transforms.Normalize(cifar10.MEAN, cifar10.STD)])
    as_floats, as_bytes = (datasets.PngDataset(data.train, each) for each in (normalize, transforms.PILToTensor()))

    def loader(images: datasets.PngDataset, workers: int) -> DataLoader:
        return DataLoader(images, _BATCH, shuffle=True, num_workers=workers)

    counts = [count for count in preset.worker_counts if 0 < count <= 2 * config.cores()]
    rates = {n: timing.loop(loader(as_floats, n), plain, preset.steps).images_per_second for n in counts}
    best = max(rates, key=rates.get)
    rungs = (
        Rung("01 naive PNG files", loader(as_floats, 1), plain),
        Rung("03 more workers", loader(as_floats, best), plain, "01 naive PNG files"),
        Rung("04 normalize on the device", loader(as_bytes, best), normalizing, "03 more workers"),
        Rung("06 packed in one file", packs.loader(packs.prepare(data), _BATCH), normalizing, "04 normalize on the device"),
    )
    return Group(rungs, data.source, preset.steps)


def preprocessing() -> Group:
    """Notebook 05, with photos: resized in every epoch, or once."""
    data = photos.prepare()
    copies = resizing.resize_ahead(data.folder, config.runs_dir() / f"photos-{_SIZE}", _SIZE)
    crop = [v2.RandomCrop(_CROP), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    naive = datasets.JpegDataset(data.folder, v2.Compose([v2.Resize(_SIZE), *crop]))
    ahead = datasets.JpegDataset(copies.folder, v2.Compose(crop))
    if config.device().type == "cuda":
        network = torchvision.models.resnet50(num_classes=len(data.classes))
        network.conv1 = nn.Sequential(models.Normalize(), network.conv1)
        step = training.accelerator_step(network)
    else:
        step = simulate.PretendAccelerator(20)

    def loader(images: datasets.JpegDataset) -> DataLoader:
        order = RandomSampler(images, num_samples=100 * len(images))  # epoch after epoch, without a pause
        return DataLoader(images, _PHOTOS, sampler=order, num_workers=1)

    rungs = (
        Rung("05 photos as they are", loader(naive), step),
        Rung("05 photos resized ahead", loader(ahead), step, "05 photos as they are"),
    )
    return Group(rungs, data.source, config.preset().steps)


def resnet() -> Group:
    """Notebooks 08 to 11, with CIFAR-10: how a step of ResNet-50 becomes faster."""
    from helpers.loading import packs  # needs a package that computes checksums

    data, workload = cifar10.prepare(), training.resnet_workload()
    loader = packs.loader(packs.prepare(data), workload.batch)

    def step(weights: torch.memory_format = torch.channels_last, fused: bool = False, **options: object) -> WithTF32:
        training.seed_everything(config.SEED)
        model = models.resnet50(workload.side).to(config.device(), memory_format=weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        return WithTF32(training.TrainingStep(model, optimizer, memory_format=weights, **options))

    contiguous = step(torch.contiguous_format)
    rungs = [Rung("08 ResNet-50", loader, WithTF32(contiguous.step, False))]
    if torch.cuda.is_tf32_supported():
        rungs.append(Rung("08 with TF32", loader, contiguous, rungs[-1].name))
    rungs.append(Rung("09 channels_last", loader, step(), rungs[-1].name))
    # Only where it is fast enough to be timed, and from there on only where it costs less than it gains
    batch, mixed = next(iter(loader)), Rung("10 mixed precision", loader, step(autocast=torch.bfloat16), rungs[-1].name)
    usual_ms = min(timing.each_call_ms(lambda: rungs[-1].step(*batch), repeats=3))
    baseline = "TF32" if torch.cuda.is_tf32_supported() else "float32"
    trial = precision.try_step(mixed.step, batch, usual_ms, baseline)
    left_out = () if trial.fast_enough else (f"{mixed.name}: {trial}",)
    best = mixed if trial.faster else rungs[-1]
    if trial.fast_enough:
        rungs.append(mixed)
    fused, to_compile = (step(fused=True, autocast=best.step.step.autocast) for _ in range(2))
    rungs.append(Rung("11 fused optimizer", loader, fused, best.name))
    try:
        compiled = _compiled(to_compile, batch)
    except compiling.CannotCompile as reason:
        return Group(tuple(rungs), data.source, config.preset().steps, (*left_out, f"11 fewer launches: {reason}"))
    rungs.append(Rung("11 fewer launches", loader, compiled, best.name))
    return Group(tuple(rungs), data.source, config.preset().steps, left_out)


def _compiled(step: WithTF32, batch: tuple[torch.Tensor, torch.Tensor]) -> WithTF32:
    """Compile a step's network, on a GPU into CUDA graphs; with the preset ci on a CPU one block of it, as notebook 11."""
    model, on_gpu = step.step.model, config.device().type == "cuda"
    if on_gpu or config.preset().name != "ci":
        model = torch.compile(model, mode="reduce-overhead" if on_gpu else None)
    else:
        model[-1].layer4[-1] = torch.compile(model[-1].layer4[-1])
    compiled = WithTF32(replace(step.step, model=model))
    compiling.first_step(compiled, *batch)
    return compiled


@dataclass(frozen=True)
class WithTF32:
    """A step with TF32 or without, whatever the steps do that are timed in turn with it."""

    step: timing.Step
    enabled: bool = True

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> object:
        with training.set_tf32(self.enabled):
            return self.step(images, labels)

    def __str__(self) -> str:
        return str(self.step)


GROUPS = (loading, preprocessing, resnet)
