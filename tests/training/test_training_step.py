import pytest
import torch

from helpers import training
from helpers.training import models, precision


def step_of(model, **options):
    return training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05), **options)


def test_a_step_lowers_the_loss_on_its_own_batch_by_as_much_in_every_run(batch):
    def run():
        training.seed_everything(0)
        step = step_of(models.SmallCNN(normalize=True))
        return [step(*batch).item() for _ in range(10)]

    losses = run()
    assert losses == sorted(losses, reverse=True) == pytest.approx(run(), rel=1e-5)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.contiguous_format, torch.channels_last])
def test_images_reach_the_network_in_the_memory_format_asked_for(batch, memory_format):
    model, seen = models.SmallCNN(normalize=True), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].stride()))
    images = batch[0].contiguous(memory_format=torch.channels_last)
    step_of(model, memory_format=memory_format)(images, batch[1])
    contiguous = memory_format == torch.contiguous_format
    assert seen == [batch[0].stride() if contiguous else images.stride()]


def test_a_step_never_asks_a_tensor_for_its_value(batch, monkeypatch):
    step = step_of(models.SmallCNN(normalize=True))
    step(*batch)  # the first one may prepare what later ones reuse
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(*batch)
    asking = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}
    assert asking.isdisjoint(event.name for event in profiler.events())


def test_tf32_concerns_products_and_convolutions_in_the_old_way_to_ask_and_in_the_new():
    def asked():
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        new = [backend.fp32_precision == "tf32" for backend in (matmul, cudnn.conv)]
        return torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32, new

    before = asked()
    with training.set_tf32(True):
        assert asked() == ("high", True, True, [True, True])
        with training.set_tf32(False):
            assert asked() == ("highest", False, False, [False, False])
        assert asked() == ("high", True, True, [True, True])
    assert asked()[:3] == before[:3]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("8 GiB"), RuntimeError("GET was unable to find an engine")])
def test_out_of_memory_says_which_batch_to_try(batch, error):
    class Huge(torch.nn.Linear):
        def forward(self, images):
            raise error

    with pytest.raises(training.OutOfMemory, match=f"(?s){error}.*batch=4"):
        step_of(Huge(1, 1))(*batch)


def test_autocast_runs_the_forward_pass_in_the_type_it_is_given(batch):
    model, seen = models.SmallCNN(normalize=True), []
    model[1].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    step_of(model)(*batch)
    step = step_of(model, autocast=torch.bfloat16)
    assert step(*batch).dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16]
    assert str(step) == "SmallCNN on CPU, autocast to bfloat16"


def test_a_step_whose_gradients_overflow_is_skipped_and_the_scale_halved(batch):
    model = models.SmallCNN(normalize=True)
    before = [weights.clone() for weights in model.parameters()]
    precision.round_layers(model, torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    step_of(model, scaler=scaler)(*batch)
    assert scaler.get_scale() == 2.0**39
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
