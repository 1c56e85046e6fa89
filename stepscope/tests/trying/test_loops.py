"""Tests of settings that are tried in a loop of this process: what is changed for a run, and that all is given back."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset

import stepscope
from stepscope import trying
from stepscope.trying import results

pytestmark = pytest.mark.timeout(300)


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
    assert found.rounds == 2 and not any(each.problem for each in found.settings)
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


def both(one, other):
    def step(*batch):
        one(*batch)
        other(*batch)

    return step


@pytest.mark.parametrize(
    ("make_its_step", "says"),
    [(lambda: lambda images, labels: None, "no optimizer of torch.optim"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_a_loop_that_cannot_be_timed_is_told_with_the_reason(make_its_step, says):
    with pytest.raises(trying.CannotTry, match=says):
        stepscope.tries(make_loader, make_its_step)
