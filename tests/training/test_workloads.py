import pytest
import torch

from helpers import config, training
from helpers.training import models, workloads


@pytest.mark.parametrize(
    ("gigabytes", "expected"), [(4, 16), (8, 32), (16, 64), (24, 128), (40, 128), (48, 256), (141, 256)]
)
@pytest.mark.parametrize("reserved", [0, 2e9])
def test_the_batch_follows_the_memory_that_others_leave_free(monkeypatch, gigabytes, expected, reserved):
    monkeypatch.setattr(config, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gigabytes * 1e9 - reserved, 200e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    workload = training.resnet_workload()
    assert (workload.batch, workload.side) == (expected, 224)
    assert f"{expected} images at 224 × 224 pixels a step (for {gigabytes} GB free)" == str(workload)
    assert training.resnet_workload(batch=8).batch == 8


def test_resnet_keeps_as_many_bytes_as_the_batch_is_chosen_by():
    model, saved = models.resnet50(224).to("meta"), {}
    weights = {id(each) for each in [*model.parameters(), *model.buffers()]}

    def keep(tensor):
        if id(tensor) not in weights:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(10, 3, 32, 32, dtype=torch.uint8, device="meta"))
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 10
    assert kept == pytest.approx(workloads._RESNET_BYTES_PER_IMAGE, rel=0.02)
