import pytest
import torch
from torchvision import transforms

from helpers import config, training
from helpers.data import cifar10
from helpers.training import models


@pytest.mark.parametrize("to_float", [False, True])
def test_normalizing_in_the_network_equals_torchvisions(batch, to_float):
    images, _ = batch
    expected = transforms.Normalize(cifar10.MEAN, cifar10.STD)(images / 255)
    given = images / 255 if to_float else images
    torch.testing.assert_close(models.Normalize()(given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("side", "memory_format"), [(32, torch.contiguous_format), (64, torch.channels_last)])
def test_resnet_takes_small_bytes_and_computes_at_the_size_asked_for_in_their_memory_format(batch, side, memory_format):
    model, seen = models.resnet50(side).to(memory_format=memory_format), []
    model[-1].conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert model(batch[0].contiguous(memory_format=memory_format)).shape == (8, 10)
    assert (seen[0].shape, seen[0].dtype) == ((8, 3, side, side), torch.float32)
    assert seen[0].is_contiguous(memory_format=memory_format)


def test_each_block_of_resnet_begins_as_the_identity():
    block = models.resnet50()[-1].layer1[1]
    features = torch.rand(2, 256, 4, 4)
    assert torch.equal(block(features), features)


@pytest.mark.slow
def test_resnet_is_one_graph_to_the_compiler(batch):
    torch._dynamo.reset()
    explained = torch._dynamo.explain(models.resnet50(64))(batch[0])
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.parametrize(("gigabytes", "reserved", "expected"), [(8, 0, 16), (24, 2e9, 64), (141, 0, 256)])
def test_the_batch_follows_the_memory_that_others_leave_free(monkeypatch, gigabytes, reserved, expected):
    monkeypatch.setattr(config, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gigabytes * 1e9 - reserved, 200e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    workload = training.resnet_workload()
    assert (workload.batch, workload.side) == (expected, 224)
    assert training.resnet_workload(batch=8).batch == 8


def test_resnet_keeps_as_many_bytes_as_the_batch_is_chosen_by():
    model, saved = models.resnet50(224).to("meta"), {}
    weights = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def keep(tensor):
        if id(tensor) not in weights:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(10, 3, 32, 32, dtype=torch.uint8, device="meta"))
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 10
    assert kept == pytest.approx(models._RESNET_BYTES_PER_IMAGE, rel=0.02)
