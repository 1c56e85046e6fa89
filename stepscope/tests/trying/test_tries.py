"""Tests of settings that are tried in a loop of this process: what is changed for a run, and that all is given back."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import stepscope
from stepscope import trying
from stepscope.trying import results

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.rand(3, 8, 8), index % 10


def make_loader():
    return DataLoader(Images(), batch_size=8, shuffle=True)


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def make_step(make_network=network):
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(images, labels):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.015)  # about as long as loading

    return step


def state():
    """Return what a run changes in PyTorch and in the random generators."""
    functions = DataLoader.__init__, DataLoader.__iter__, torch.Tensor.backward, nn.Module.__call__
    numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    flags = torch.get_num_threads(), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision()
    return functions, numbers, flags, len(_global_optimizer_pre_hooks)


@pytest.mark.processes
def test_workers_gain_and_pytorch_and_the_generators_are_as_before():
    before = state()
    found = stepscope.tries(
        make_loader, make_step, settings=["workers", "precision", "channels_last"], rounds=2, steps=8
    )
    assert state() == before
    assert found.rounds == 2
    assert all(each.problem.startswith("slower") for each in found.settings if each.problem)  # on a busy machine
    seen = {each.name: each.runs[0] for each in (found.base, *found.settings)}
    assert seen["num_workers=1"]["loader"]["workers"] == 1 and seen["as it is"]["loader"]["workers"] == 0
    assert seen["bfloat16"]["losses"] != seen["as it is"]["losses"] == seen["channels_last"]["losses"]
    assert seen["as it is"]["loader"]["line"].endswith("return DataLoader(Images(), batch_size=8, shuffle=True)")
    gain = results.compared(found.base, found.settings).ratio("num_workers=1")
    assert gain.mean > 1.1


def test_a_network_that_all_runs_share_is_given_back_as_it_was():
    shared = network()
    found = stepscope.tries(
        make_loader, lambda: make_step(lambda: shared), settings=["precision", "channels_last"], rounds=1, steps=8
    )
    assert len(found.settings) == 2 and "forward" not in vars(shared)
    assert all(weight.is_contiguous() for weight in shared.parameters())


def test_a_setting_that_is_not_applied_or_fails_is_told_and_not_recommended():
    loader = make_loader()
    found = stepscope.tries(lambda: loader, make_step, settings=["workers"], rounds=1, steps=8)
    assert found.settings and all("could not be applied" in each.problem for each in found.settings)

    def refuses(images, labels):
        assert torch.get_num_threads() == before, "no other number"

    before = torch.get_num_threads()
    found = stepscope.tries(make_loader, lambda: both(make_step(), refuses), settings=["threads"], rounds=1, steps=8)
    assert all("AssertionError: no other number" in each.problem for each in found.settings)
    assert torch.get_num_threads() == before


def test_an_interrupt_gives_pytorch_back_and_unknown_settings_are_refused():
    before = state()

    def interrupted():
        def step(images, labels):
            network()(images)
            raise KeyboardInterrupt

        return step if len(made) > 1 else make_step()

    made = []
    with pytest.raises(KeyboardInterrupt):
        stepscope.tries(make_loader, lambda: made.append(1) or interrupted(), settings=["precision"], rounds=1, steps=8)
    assert state() == before
    with pytest.raises(ValueError, match="found workrs"):
        stepscope.tries(make_loader, make_step, settings=["workrs"])


def both(one, other):
    def step(*batch):
        one(*batch)
        other(*batch)

    return step


class Stream(IterableDataset):
    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker and self.kind != "all samples" else (0, 1)
        for number in range(first, 64, step):
            image = torch.rand(3, 8, 8) if self.kind == "random" else torch.full((3, 8, 8), number / 64)
            yield {"images": image, "labels": number % 10, "name": f"{number}.png"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("own part", ""),
        ("all samples", "128 samples in an epoch in place of 64"),
        ("random", "other samples in an epoch, perhaps by random transforms"),
    ],
)
def test_workers_of_an_iterable_dataset_are_tried_only_if_an_epoch_has_the_same_samples(kind, says):
    step = make_step()
    found = stepscope.tries(
        lambda: DataLoader(Stream(kind), batch_size=8),
        lambda: lambda batch: step(batch["images"], batch["labels"]),
        settings=["workers"], rounds=1, steps=8,
    )  # fmt: skip
    problems = {each.name: each.problem for each in found.settings}
    if "num_workers=2" in problems:  # not on a single core
        assert problems["num_workers=2"].startswith(says) and bool(problems["num_workers=2"]) == bool(says)
    assert bool(problems["num_workers=1"]) == (kind == "random")  # one worker yields each sample once


@pytest.mark.parametrize(
    ("make_its_step", "says"),
    [(lambda: lambda images, labels: None, "no optimizer of torch.optim"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_a_loop_that_cannot_be_timed_is_told_with_the_reason(make_its_step, says):
    with pytest.raises(trying.CannotTry, match=says):
        stepscope.tries(make_loader, make_its_step)
