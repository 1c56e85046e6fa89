import numpy as np
import pytest
import torch

from helpers import training
from helpers.training import models


def test_an_epoch_reports_a_loss_a_step_and_the_share_of_right_answers(batch):
    training.seed_everything(0)
    model = models.SmallCNN(normalize=True)
    epoch = training.train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.0), [batch] * 3, progress=False)
    right = (model(batch[0]).argmax(1) == batch[1]).float().mean().item()
    assert epoch.losses.shape == (3,)
    assert epoch.accuracy == pytest.approx(right)


def test_evaluation_does_not_change_the_network(batch):
    model = models.SmallCNN(normalize=True)
    before = [weights.clone() for weights in model.parameters()]
    evaluated = training.evaluate(model, [batch])
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).item()
    assert evaluated.losses == pytest.approx([loss], rel=1e-4)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_losses_are_the_same_in_every_run(batch):
    def losses():
        training.seed_everything(7)
        model = models.SmallCNN(normalize=True)
        return training.train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch] * 3, False).losses

    assert np.array_equal(losses(), losses())
