import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision import transforms
from torchvision.transforms import v2

from helpers import simulate, training
from helpers.loading import datasets, resident
from helpers.loading.formats import ShuffledBatches
from helpers.results.describing import describe
from helpers.training import models


class Images(TensorDataset):
    """Four images, with what a dataset of files has."""

    def __init__(self, transform=None, **settings):
        super().__init__(torch.zeros(4, 1))
        self.transform = transform
        for name, value in settings.items():
            setattr(self, name, value)


def loader(dataset=None, batch=2, **settings):
    return DataLoader(dataset or Images(), batch, **settings)


def step(model=None, optimizer=torch.optim.SGD, **settings):
    model = nn.Sequential(nn.Conv2d(3, 2, 3)) if model is None else model
    options = {name: settings.pop(name) for name in ("lr", "fused", "momentum") if name in settings}
    return training.TrainingStep(model, optimizer(model.parameters(), **options), **settings)


LOADERS = {
    "Images, in batches of 2, in order, 0 workers; ": loader,
    "in batches of 4": lambda: loader(batch=4),
    "only full ones": lambda: loader(drop_last=True),
    "shuffled": lambda: loader(shuffle=True),
    "shuffled, seed 7": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(7)),
    "shuffled, 100 epochs without a pause": lambda: loader(sampler=RandomSampler(Images(), num_samples=400)),
    "ShuffledBatches of 2": lambda: DataLoader(Images(), batch_sampler=ShuffledBatches(4, 2)),
    "1 worker": lambda: loader(num_workers=1),
    "2 workers": lambda: loader(num_workers=2),
    "workers stay": lambda: loader(num_workers=2, persistent_workers=True),
    "prefetch factor 8": lambda: loader(num_workers=2, prefetch_factor=8),
    "in pinned memory": lambda: loader(pin_memory=True),
    "collated by list": lambda: loader(collate_fn=list),
    "Images (ToTensor())": lambda: loader(Images(transforms.ToTensor())),
    "RandomHorizontalFlip(p=0.5) → ToTensor()": lambda: loader(
        Images(transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]))
    ),
    "→ PILToTensor()": lambda: loader(Images(v2.Compose([v2.Compose([v2.RandomCrop(2)]), v2.PILToTensor()]))),
    "Images decoder torchvision": lambda: loader(Images(decoder="torchvision")),
    "Images draft 256": lambda: loader(Images(draft=256)),
    "Images storage simulated storage": lambda: loader(Images(storage=simulate.SHARED_FILE_SYSTEM)),
    "Transformed of Images draft 4 (RandomCrop(": lambda: loader(
        datasets.Transformed(Images(draft=4), v2.RandomCrop(2))
    ),
    "OnDevice, in batches of 2; ": lambda: resident.OnDevice(torch.zeros(4), torch.zeros(4), 2),
    "list; ": lambda: [torch.zeros(2)],
}


def replaying(recorded):
    """As `training.graphed` returns it, which needs a GPU."""

    def replay(images, labels):
        pass

    replay.step = recorded
    return replay


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    """On a GPU it is a part of every description."""
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)


STEPS = {
    "Sequential, weights contiguous_format, images preserve_format, SGD(lr=0.001)": step,
    "simulated accelerator (5 ms a step)": lambda: simulate.SimulatedAccelerator(5),
    "simulated accelerator (20 ms a step)": lambda: simulate.SimulatedAccelerator(20),
    "SmallCNN, weights": lambda: step(models.SmallCNN()),
    "SmallCNN, normalizing": lambda: step(models.SmallCNN(normalize=True)),
    "weights channels_last": lambda: step(nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)),
    "images channels_last": lambda: step(memory_format=torch.channels_last),
    "AdamW(lr=0.001)": lambda: step(optimizer=torch.optim.AdamW),
    "SGD(lr=0.5)": lambda: step(lr=0.5),
    "SGD(lr=0.001, fused=True)": lambda: step(fused=True),
    "SGD(lr=0.001, fused=False)": lambda: step(fused=False),
    "SGD(lr=0.001, momentum=0.9)": lambda: step(momentum=0.9),
    "autocast to bfloat16": lambda: step(autocast=torch.bfloat16),
    "loss scaled": lambda: step(scaler=torch.amp.GradScaler("cpu")),
    "SGD(lr=0.001), compiled": lambda: step(torch.compile(nn.Conv2d(3, 2, 3))),
    "compiled, into CUDA graphs": lambda: step(torch.compile(nn.Conv2d(3, 2, 3), mode="reduce-overhead")),
    "replayed as a CUDA graph": lambda: replaying(step(lr=0.3)),
    "crop_and_flip, then Sequential": lambda: training.Augmented(step(lr=0.2), training.crop_and_flip),
    "1 layer compiled": lambda: step(nn.Sequential(torch.compile(nn.Conv2d(3, 2, 3)))),
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("words", LOADERS)
def test_a_setting_of_a_loader_is_named(words):
    described = describe(LOADERS[words](), simulate.SimulatedAccelerator(5))
    assert words in described


@pytest.mark.parametrize("words", STEPS)
def test_a_setting_of_a_step_is_named(words):
    assert f"; {words}" in describe(loader(), STEPS[words]()) or f", {words}" in describe(loader(), STEPS[words]())


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_what_differs_in_one_setting_differs_in_words():
    assert len({describe(made(), simulate.SimulatedAccelerator(5)) for made in LOADERS.values()}) == len(LOADERS)
    assert len({describe([], made()) for made in STEPS.values()}) == len(STEPS)


def test_whether_float32_is_rounded_is_named_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    described = [describe(loader(), training.WithTF32(step(), enabled)) for enabled in (True, False)]
    assert described[0] == f"{described[1]}, TF32"
    with training.set_tf32(False):
        assert describe(loader(), step()) == described[1]


def test_to_describe_a_loader_draws_nothing_from_it():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    describe(loader(shuffle=True), simulate.SimulatedAccelerator(5))
    assert torch.equal(torch.rand(1), expected)


def collating(batch, extra):
    return batch


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"collate_fn": functools.partial(collating, extra=1)}, "collated by partial"),
        ({"batch": None}, "in batches of its own"),
        ({"batch": 1, "batch_sampler": [[0, 1], [2, 3]]}, "list of its own size"),
    ],
    ids=["collate", "no batches", "batch sampler"],
)
def test_a_loader_of_ones_own_is_described_as_far_as_it_is_known(settings, words):
    assert words in describe(loader(**settings), simulate.SimulatedAccelerator(5))


def test_a_step_of_ones_own_is_described_as_far_as_it_is_known():
    class Own(torch.optim.SGD):
        def __init__(self, params, depth=3):
            assert len(list(params)) > 1
            super().__init__([torch.nn.Parameter(torch.zeros(2))], lr=0.5)

    described = describe([], step(torch.compile(nn.Conv2d(3, 2, 3), backend="eager"), Own))
    assert "Own(lr=0.5)" in described and "compiled" in described
