import gc

import pytest
import torch

from helpers import training
from helpers.training import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
        return [step(*images_and_labels).item() for images_and_labels in (batch, other, batch, other)]

    assert trained(True) == pytest.approx(trained(False), abs=1e-2)


def test_a_recorded_graph_keeps_the_weights_that_it_trains_and_takes_no_batch_of_another_shape(batch):
    def new_step():
        training.seed_everything(0)
        model = models.SmallCNN(normalize=True).cuda()
        return training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    usual = new_step()
    expected = [usual(*batch).item() for _ in range(6)][3:]
    recorded = training.graphed(new_step(), *batch)  # nobody else holds the step; it trains three times
    gc.collect()
    with_nans = [torch.full_like(weight, torch.nan) for weight in usual.model.parameters()]  # where freed weights lay
    losses = [recorded(*batch).item() for _ in range(3)]
    assert losses == pytest.approx(expected, abs=1e-2)
    assert all(weight.isnan().all() for weight in with_nans)
    with pytest.raises(ValueError, match="shape"):
        recorded(batch[0][:1], batch[1][:1])
