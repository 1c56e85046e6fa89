import gc

import pytest
import torch

from helpers import training
from helpers.training import models


def test_only_a_model_on_a_gpu_can_be_recorded_as_a_graph(batch):
    model = models.SmallCNN(normalize=True)
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with pytest.raises(ValueError, match="on a GPU, found it on the cpu"):
        training.graphed(step, *batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_recorded_graph_learns_what_the_step_learns(batch, autocast):
    other = (batch[0].flip(0), batch[1].flip(0))

    def trained(recorded):
        training.seed_everything(0)
        model = models.SmallCNN(normalize=True).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        step = training.TrainingStep(model, optimizer, autocast=autocast)
        if recorded:
            step = training.graphed(step, *batch)  # trains three times on the first batch
        else:
            for _ in range(3):
                step(*batch)
        return [step(*each).item() for each in (batch, other, batch, other)]

    assert trained(True) == pytest.approx(trained(False), abs=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_graph_keeps_the_weights_that_it_trains(batch):
    def new_step():
        training.seed_everything(0)
        model = models.SmallCNN(normalize=True).cuda()
        return training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    usual = new_step()
    expected = [usual(*batch).item() for _ in range(6)][3:]
    recorded = training.graphed(new_step(), *batch)  # nobody else holds the step; it trains three times
    gc.collect()
    with_nans = [torch.full_like(weight, torch.nan) for weight in usual.model.parameters()]  # where freed weights lay
    found = [recorded(*batch).item() for _ in range(3)]
    assert found == pytest.approx(expected, abs=1e-2)
    assert all(each.isnan().all() for each in with_nans)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_with_an_accuracy_is_not_recorded(batch):
    model = models.SmallCNN(normalize=True).cuda()
    accuracy = training.new_accuracy(torch.device("cuda"))
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05), accuracy)
    with pytest.raises(ValueError, match="without an accuracy"):
        training.graphed(step, *batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_graph_takes_no_batch_of_another_shape(batch):
    model = models.SmallCNN(normalize=True).cuda()
    step = training.graphed(training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05)), *batch)
    with pytest.raises(ValueError, match="shape"):
        step(batch[0][:1], batch[1][:1])
