"""Run 5: the small network's rungs 01 to 07, and augmentation and step as one CUDA graph."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import v2

from helpers import training
from helpers.data import cifar10
from helpers.loading import datasets
from helpers.training import models
from stepscope.base import machine
from tests.gpu import materials
from tests.gpu.measuring import Run, Steps

BATCH = 128


class Rows(Dataset):
    """Images of a mapped file of pixels, one by one."""

    def __init__(self, path: str, labels: torch.Tensor):
        self.pixels, self.labels = np.load(path, mmap_mode="r"), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.pixels[index].copy()), int(self.labels[index])


class OnDevice:
    """Shuffled batches of a data set in the GPU's memory, anew for each epoch."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor):
        self.pixels, self.labels = pixels.cuda(), labels.cuda()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return materials.recipes().batches_on_device(self.pixels, self.labels, BATCH)


class CropAndFlip(nn.Module):
    """The augmentation of notebook 07 as the first layer of a network."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Crop and flip images of shape (N, C, H, W), each by a draw of its own."""
        return training.crop_and_flip(pixels)


def small_network(run: Run) -> None:
    """Measure the rungs from PNG files to a data set on the device, the step alone, and one CUDA graph."""
    data = materials.images(run.small)
    path, labels = materials.packed(data)
    pixels, recipes = torch.from_numpy(np.load(path)), materials.recipes()
    floats = transforms.Compose([transforms.ToTensor(), transforms.Normalize(cifar10.MEAN, cifar10.STD)])
    augment = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
    workers = 1 if run.small else machine.cores()
    few, many = (2, 2) if run.small else (40, 400)  # steps of a round, where workers load, and elsewhere

    def loader(dataset: Dataset, workers: int, **options: object) -> DataLoader:
        return DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, **options)

    def files(transform: Callable, workers: int = workers) -> DataLoader:
        return loader(datasets.PngDataset(data.train, transform), workers)

    def in_batches() -> DataLoader:
        return loader(recipes.Packed(path, labels), 0, collate_fn=recipes.as_it_is, pin_memory=True)

    def image_by_image() -> DataLoader:
        return loader(datasets.Transformed(Rows(str(path), labels), augment), workers, pin_memory=True)

    def step(normalize: bool = True) -> Callable:
        return training.gpu_step(models.SmallCNN(normalize))

    def augmented() -> Callable:
        return training.Augmented(step(), training.crop_and_flip)

    def graph() -> Callable:
        model = nn.Sequential(CropAndFlip(), models.SmallCNN(normalize=True)).cuda()
        plain = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05))
        return training.graphed(plain, pixels[:BATCH], labels[:BATCH])

    def rung(new_loader: Callable[[], Iterable], new: Callable[[], Callable], count: int) -> Callable[[], Steps]:
        return lambda: Steps(new(), new_loader(), count)

    on_device, of_floats = partial(OnDevice, pixels, labels), partial(step, normalize=False)
    run.compare("ladder", {
        "01 naive PNG files": rung(partial(files, floats, 1), of_floats, few),
        "03 more workers": rung(partial(files, floats), of_floats, few),
        "04 normalize on the device": rung(partial(files, transforms.PILToTensor()), step, few),
        "06 packed in one file": rung(in_batches, step, many),
        "07 augmented image by image": rung(image_by_image, step, few),
        "07 augmented on the device": rung(in_batches, augmented, many),
        "07 data set on the device": rung(on_device, augmented, many),
        "12 one CUDA graph": rung(on_device, graph, many),
        "the step alone": rung(lambda: [(pixels[:BATCH].cuda(), labels[:BATCH].cuda())], step, many),
    }, traced=["07 data set on the device", "12 one CUDA graph", "the step alone"])  # fmt: skip
