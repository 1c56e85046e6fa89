"""Tests of settings that are tried in a loop of this process: what is changed for a run, and that all is given back."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stepscope
from stepscope import trying

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ITEM_S, STEP_S = 0.002, 0.015  # a batch of eight items is loaded for as long as a step waits


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(ITEM_S)
        return torch.rand(3, 8, 8), index % 10


def make_loader():
    return DataLoader(Images(), batch_size=8, shuffle=True)


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def make_step(model=None):
    model = model or network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(images, labels):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)

    return step


def state():
    """Return what a run changes in PyTorch and in the random generators."""
    functions = DataLoader.__init__, DataLoader.__iter__, torch.Tensor.backward, nn.Module.__call__
    numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    flags = torch.get_num_threads(), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision()
    return functions, numbers, flags, len(_global_optimizer_pre_hooks)


def test_a_setting_is_changed_for_its_runs_and_pytorch_the_generators_and_the_networks_are_as_before():
    before, networks = state(), []

    def make_its_step():
        networks.append(network())
        return make_step(networks[-1])

    wanted = ["workers", "fused", "precision", "channels_last"]
    found = stepscope.tries(make_loader, make_its_step, settings=wanted, rounds=1, steps=8)
    assert state() == before
    assert not any("forward" in vars(each) for each in networks)
    assert all(weight.is_contiguous() for each in networks for weight in each.parameters())
    assert found.rounds == 1 and not any(each.problem for each in found.settings)
    seen = {each.name: each.runs[0] for each in (found.base, *found.settings)}
    assert seen["num_workers=1"]["loader"]["workers"] == 1 and seen["as it is"]["loader"]["workers"] == 0
    assert seen["as it is"]["optimizers"][0]["fused"] and not seen["fused=True"]["optimizers"][0]["fused"]
    # Equal but for the order of sums, which some processors change with the addresses of the tensors
    equal = pytest.approx(seen["as it is"]["losses"], abs=1e-5)
    assert seen["channels_last"]["losses"] == equal and seen["bfloat16"]["losses"] != equal
    assert seen["as it is"]["loader"]["line"].endswith("return DataLoader(Images(), batch_size=8, shuffle=True)")
    assert seen["as it is"]["seconds"] > len(seen["as it is"]["durations"]) * (8 * ITEM_S + STEP_S)


def test_a_setting_that_fails_is_told_and_not_recommended():
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
    """Each worker yields all samples."""

    def __iter__(self):
        for number in range(64):
            yield {"images": torch.full((3, 8, 8), number / 64), "labels": number % 10, "name": f"{number}.png"}


def test_workers_of_an_iterable_dataset_are_tried_only_if_an_epoch_has_the_same_samples():
    step = make_step()
    found = stepscope.tries(
        lambda: DataLoader(Stream(), batch_size=8),
        lambda: lambda batch: step(batch["images"], batch["labels"]),
        settings=["workers"], rounds=1, steps=8,
    )  # fmt: skip
    problems = {each.name: each.problem for each in found.settings}
    if "num_workers=2" in problems:  # not on a single core
        assert problems["num_workers=2"].startswith("128 samples in an epoch in place of 64")
    assert not problems["num_workers=1"]  # one worker yields each sample once


@pytest.mark.parametrize(
    ("make_its_step", "says"),
    [(lambda: lambda images, labels: None, "no optimizer of torch.optim"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_a_loop_that_cannot_be_timed_is_told_with_the_reason(make_its_step, says):
    with pytest.raises(trying.CannotTry, match=says):
        stepscope.tries(make_loader, make_its_step)
