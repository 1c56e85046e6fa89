import numpy as np
import pytest
import torch
from torchvision import transforms

from helpers import cifar10, models, training


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.arange(8) % 10


def test_the_network_has_the_layers_of_the_course():
    shapes = [tuple(weights.shape) for weights in models.SmallCNN().parameters() if weights.ndim > 1]
    assert shapes == [(8, 3, 3, 3), (32, 8, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3), (2048, 2048), (10, 2048)]


@pytest.mark.parametrize("to_float", [False, True])
def test_normalizing_in_the_network_equals_torchvisions(batch, to_float):
    images, _ = batch
    expected = transforms.Normalize(cifar10.MEAN, cifar10.STD)(images / 255)
    given = images / 255 if to_float else images
    torch.testing.assert_close(models.Normalize()(given), expected, rtol=1e-5, atol=1e-5)


def test_a_step_lowers_the_loss_on_its_own_batch(batch):
    training.seed_everything(0)
    model = models.SmallCNN(normalize=True)
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses = [step(*batch).item() for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1


def test_a_step_never_asks_a_tensor_for_its_value(batch, monkeypatch):
    model = models.SmallCNN(normalize=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = training.TrainingStep(model, optimizer, training.new_accuracy(torch.device("cpu")))
    step(*batch)  # the first one may prepare what later ones reuse
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(*batch)
    assert not {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"} & {event.name for event in profiler.events()}


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


def test_an_endless_loader_goes_on_after_an_epoch():
    batches = training.endless([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_an_endless_loader_without_batches_says_so():
    with pytest.raises(ValueError, match="no mini-batch"):
        next(training.endless([]))


def test_without_a_gpu_the_accelerator_is_pretended_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step = training.accelerator_step(models.SmallCNN())
    assert "pretend accelerator" in str(step)


def test_losses_are_the_same_in_every_run(batch):
    def losses():
        training.seed_everything(7)
        model = models.SmallCNN(normalize=True)
        return training.train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch] * 3, False).losses

    assert np.array_equal(losses(), losses())
