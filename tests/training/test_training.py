import numpy as np
import pytest
import torch
from torchvision import transforms

from helpers import config, training
from helpers.data import cifar10
from helpers.training import models, precision, workloads


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
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.contiguous_format, torch.channels_last])
def test_images_reach_the_network_in_the_memory_format_asked_for(batch, memory_format):
    model, seen = models.SmallCNN(normalize=True), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].stride()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images = batch[0].contiguous(memory_format=torch.channels_last)
    training.TrainingStep(model, optimizer, memory_format=memory_format)(images, batch[1])
    contiguous = memory_format == torch.contiguous_format
    assert seen == [batch[0].stride() if contiguous else images.stride()]


def test_a_step_never_asks_a_tensor_for_its_value(batch, monkeypatch):
    model = models.SmallCNN(normalize=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = training.TrainingStep(model, optimizer, training.new_accuracy(torch.device("cpu")))
    step(*batch)  # the first one may prepare what later ones reuse
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(*batch)
    assert not {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"} & {
        event.name for event in profiler.events()
    }


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


def test_without_a_gpu_the_accelerator_is_simulated_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step = training.accelerator_step(models.SmallCNN())
    assert "simulated accelerator" in str(step)


def test_losses_are_the_same_in_every_run(batch):
    def losses():
        training.seed_everything(7)
        model = models.SmallCNN(normalize=True)
        return training.train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch] * 3, False).losses

    assert np.array_equal(losses(), losses())


@pytest.mark.parametrize("side", [32, 64])
def test_resnet_takes_small_bytes_and_computes_at_the_size_asked_for(batch, side):
    model, seen = models.resnet50(side), []
    model[-1].conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert model(batch[0]).shape == (8, 10)
    assert seen[0].shape == (8, 3, side, side)
    assert seen[0].dtype == torch.float32


def test_normalizing_before_enlarging_equals_normalizing_after(batch):
    normalize, enlarge, _ = models.resnet50(64)
    torch.testing.assert_close(enlarge(normalize(batch[0])), normalize(enlarge(batch[0] / 255)), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("gigabytes", "expected"), [(4, 16), (8, 32), (16, 64), (24, 128), (40, 128), (48, 256), (141, 256)]
)
def test_the_batch_follows_the_memory_of_the_gpu(monkeypatch, gigabytes, expected):
    class Properties:
        total_memory = gigabytes * 1e9

    monkeypatch.setattr(config, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    workload = training.resnet_workload()
    assert (workload.batch, workload.side) == (expected, 224)
    assert f"{expected} images at 224 × 224 pixels a step (for {gigabytes} GB)" == str(workload)
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


def test_tf32_concerns_products_and_convolutions_in_all_ways_to_ask(monkeypatch):
    def asked():
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        )

    def newly_asked():
        return [each.fp32_precision == "tf32" for each in (torch.backends.cuda.matmul, torch.backends.cudnn.conv)]

    before = asked()
    with training.set_tf32(True):
        assert asked() == ("high", True, True)
        assert newly_asked() == [True, True]
        with training.set_tf32(False):
            assert asked() == ("highest", False, False)
            assert newly_asked() == [False, False]
        assert newly_asked() == [True, True]
    assert asked() == before


def test_out_of_memory_says_which_batch_to_try(batch):
    class Huge(torch.nn.Linear):
        def forward(self, images):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 8 GiB.")

    model = Huge(1, 1)
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(training.OutOfMemory, match=r"(?s)with 8 images .* 8 GiB.*Try 4 images: give batch=4") as raised:
        step(*batch)
    assert isinstance(raised.value.__cause__, torch.cuda.OutOfMemoryError)


@pytest.mark.processes
def test_a_step_is_named_after_its_network_also_when_compiled():
    model = torch.compile(models.resnet50(64))
    assert (
        str(training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1))) == "ResNet-50 at 64 × 64 on CPU"
    )


def test_autocast_runs_the_forward_pass_in_the_type_it_is_given(batch):
    model, seen = models.SmallCNN(normalize=True), []
    model[1].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for autocast in (None, torch.bfloat16):
        step = training.TrainingStep(model, optimizer, autocast=autocast)
        loss = step(*batch)
    assert seen == [torch.float32, torch.bfloat16]
    assert loss.dtype == torch.float32
    assert str(step) == "SmallCNN on CPU, autocast to bfloat16"


def test_a_loss_scale_does_not_change_what_is_learned(batch):
    def losses(**options):
        training.seed_everything(0)
        model = models.SmallCNN(normalize=True)
        step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05), **options)
        return [step(*batch).item() for _ in range(5)]

    assert losses(scaler=torch.amp.GradScaler("cpu")) == pytest.approx(losses(), abs=1e-5)


def test_a_step_whose_gradients_overflow_is_skipped_and_the_scale_halved(batch):
    model = models.SmallCNN(normalize=True)
    before = [weights.clone() for weights in model.parameters()]
    precision.round_layers(model, torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05), scaler=scaler)(*batch)
    assert scaler.get_scale() == 2.0**39
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


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
def test_a_recorded_graph_takes_no_batch_of_another_shape(batch):
    model = models.SmallCNN(normalize=True).cuda()
    step = training.graphed(training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05)), *batch)
    with pytest.raises(ValueError, match="shape"):
        step(batch[0][:1], batch[1][:1])
