import pytest
import torch
from torchvision import transforms

from helpers import config, training
from helpers.data import cifar10
from helpers.training import models


def test_the_network_has_the_layers_of_the_course():
    shapes = [tuple(weights.shape) for weights in models.SmallCNN().parameters() if weights.ndim > 1]
    assert shapes == [(8, 3, 3, 3), (32, 8, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3), (2048, 2048), (10, 2048)]


@pytest.mark.parametrize("to_float", [False, True])
def test_normalizing_in_the_network_equals_torchvisions(batch, to_float):
    images, _ = batch
    expected = transforms.Normalize(cifar10.MEAN, cifar10.STD)(images / 255)
    given = images / 255 if to_float else images
    torch.testing.assert_close(models.Normalize()(given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [32, 64])
def test_resnet_takes_small_bytes_and_computes_at_the_size_asked_for(batch, side):
    model, seen = models.resnet50(side), []
    model[-1].conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert model(batch[0]).shape == (8, 10)
    assert seen[0].shape == (8, 3, side, side)
    assert seen[0].dtype == torch.float32


def test_resnet_keeps_the_memory_format_of_its_images(batch):
    model, seen = models.resnet50(64).to(memory_format=torch.channels_last), []
    model[-1].conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(batch[0].contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_each_block_of_resnet_begins_as_the_identity():
    block = models.resnet50()[-1].layer1[1]
    features = torch.rand(2, 256, 4, 4)
    assert torch.equal(block(features), features)


@pytest.mark.slow
def test_resnet_is_one_graph_to_the_compiler(batch):
    torch._dynamo.reset()
    explained = torch._dynamo.explain(models.resnet50(64))(batch[0])
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.parametrize(("gigabytes", "reserved", "expected"), [(8, 0, 32), (24, 2e9, 128), (141, 0, 256)])
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
