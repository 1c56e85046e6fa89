"""Checks of notebooks 08 to 13: copies to the device, memory formats, mixed precision, launches, memory."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers import config
from helpers.lessons.checks.answering import Wrong, answered, expect, expect_number, given, slip
from helpers.training.called_operators import Calls
from stepscope.base.wording import counted


def _batches(count: int, images: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [
        (torch.rand(images, 3, 8, 8, generator=drawn), torch.randint(10, (images,), generator=drawn))
        for _ in range(count)
    ]


@answered
def one_ahead(written: Callable) -> str:
    """Notebook 08: ``written(loader, start_copy, finish_copy)`` starts the next copy, then yields a batch."""
    for count in (6, 1, 0):
        batches = [(images, torch.full_like(labels, number)) for number, (images, labels) in enumerate(_batches(count))]
        read: list[Sequence[torch.Tensor]] = []
        started: list[int] = []
        finished: list[int] = []

        def start_copy(batch: Sequence[torch.Tensor], started: list = started) -> tuple[str, int]:
            started.append(int(batch[1][0]))
            return "started", started[-1]

        def finish_copy(batch: tuple[str, int], finished: list = finished, count: int = count) -> tuple[str, int]:
            expect(batch, "what start_copy returned", batch, f"finish_copy, with a loader of {count}")
            finished.append(batch[1])
            return "copied", batch[1]

        def noted(batch: Sequence[torch.Tensor], read: list = read) -> Sequence[torch.Tensor]:
            read.append(batch)
            return batch

        loader: DataLoader = DataLoader(batches, None, collate_fn=noted)  # type: ignore[arg-type]  # a list will do
        found = written(loader, start_copy, finish_copy)
        hint = "All batches would be on the device at once."
        expect(isinstance(found, Iterator), "a function that yields batches", type(found).__name__, hint=hint)
        number = -1
        for number, batch in enumerate(found):
            case, ahead = f"when batch {number} was yielded", len(started) - number - 1
            expect(batch == ("copied", number), "the batch as finish_copy returns it", str(batch)[:60], case)
            hint = (
                "All batches may not fit into the device's memory; without one ahead, the device waits for each copy."
            )
            expect(ahead == (number + 1 < count), "one copy started ahead, if a batch is left", ahead, case, hint)
            hint = "A whole epoch may not fit into memory."
            expect(len(read) <= len(started) + 1, "no more batches to be read", len(read), case, hint)
            hint = "The device then waits for a copy that should overlap with computing."
            expect(len(finished) == number + 1, f"{number + 1} calls of finish_copy", len(finished), case, hint)
        expect(number + 1 == count, f"{count} batches from a loader of {count}", number + 1)
    return "each batch comes while the next one is being copied, and none is lost."


@answered
def attainable(written: Callable) -> str:
    """Notebook 09: ``written(intensity, tflops, gb_per_second)`` returns the most TFLOP/s that both limits allow."""
    for intensity, tflops, gb_per_second in ((0.125, 2.0, 100.0), (50.0, 2.0, 100.0), (4.0, 60.0, 4800.0)):
        memory = intensity * gb_per_second / 1e3  # TFLOP/s
        slips = {
            "Those are GFLOP/s: 1 TFLOP = 1000 GFLOP.": min(tflops, memory) * 1e3,
            "It cannot compute faster than the peak.": memory,
            "The lower limit holds. GB/s times operations per byte are GFLOP/s.": max(tflops, memory),
            "More operations per byte need fewer bytes.": min(tflops, gb_per_second / intensity / 1e3),
        }
        case = f"{intensity:g} operations per byte, {tflops:g} TFLOP/s, {gb_per_second:g} GB/s"
        hint = "How many operations a second do the bytes allow, and how many does the peak?"
        expect_number(written(intensity, tflops, gb_per_second), min(tflops, memory), case, hint, slips)
    return "below the ridge memory decides, above it the peak."


@answered
def channel_norm(written: Callable) -> str:
    """Notebook 10: ``written(images, weight, bias)`` normalizes the channels of each pixel, and keeps channels_last."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.rand(2, 6, 4, 5, generator=drawn)
    weight, bias = (torch.rand(6, generator=drawn).requires_grad_() for _ in range(2))
    mean, variance = images.mean(1, keepdim=True), images.var(1, keepdim=True, correction=0)
    scaled = (images - mean) / (variance + 1e-5).sqrt()
    expected = scaled * weight.detach().view(1, -1, 1, 1) + bias.detach().view(1, -1, 1, 1)
    last = images.contiguous(memory_format=torch.channels_last)
    with Calls() as operators:
        found = written(last, weight, bias)
    results = {"images in channels_last": found}
    with suppress(RuntimeError):  # of view(), which does not copy: right, too
        results["contiguous images"] = written(images, weight, bias)
    for case, result in results.items():
        expect(isinstance(result, torch.Tensor), "a tensor", type(result).__name__, case)
        expect(result.shape == images.shape, f"the shape {tuple(images.shape)}", tuple(result.shape), case)
        difference = float((result.detach() - expected).abs().max())
        right = "mean 0 and variance 1 over the channels of each pixel, then times weight, plus bias"
        said = slip(result.detach(), {"Weights and biases are left out.": scaled})
        expect(difference < 1e-2, right, f"a number that differs by {difference:.2g}", case, said)
    strides = f"the strides of the input, {last.stride()}"
    expect(found.is_contiguous(memory_format=torch.channels_last), strides, found.stride())
    copying = ("clone", "copy_", "_to_copy", "contiguous")
    copies = [name for name, result in operators.calls if name in copying and result.dim() == 4]
    expect(not copies, "no operator that copies the images", f"aten::{', aten::'.join(copies)}")
    found.sum().backward()
    expect(weight.grad is not None and bias.grad is not None, "gradients for weight and bias", "a missing one")
    return "the same numbers, in channels_last, and nothing was copied."


@answered
def accumulated_step(written: Callable) -> str:
    """Notebook 11: ``written(model, optimizer, scaler, parts, largest_norm)`` does one step with a batch in parts."""
    (mine, my_optimizer), (right, optimizer) = _new_training(), _new_training()
    scaler = torch.amp.GradScaler(config.device().type, init_scale=1024.0, growth_interval=1000)
    types, ahead, steps = [], [], []  # ahead: images of each forward that waits for its backward

    def watch(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        types.append(output.dtype)
        if output.requires_grad:
            ahead.append(len(output))
            expect(sum(ahead) <= 8, "one part's 8 images, then its backward()", sum(ahead), hint="More may not fit.")
            output.register_hook(lambda gradient: ahead.clear())

    mine[0].register_forward_hook(watch)
    my_optimizer.register_step_post_hook(lambda *_: steps.append(1))
    kept = "A step begins with no gradients."
    for case, parts, largest_norm, hint in (
        ("the first step, equal parts", _parts()[:2], 1e6, "The loss of the batch is a mean over all its images."),
        ("parts that differ in size", _parts(), 1e6, "All images count the same, so a smaller part counts less."),
        ("gradients left from before", _parts(), 1e6, kept),
        ("clipped to 0.1", _parts(), 0.1, "Clip the norm of the gradients without the scaler's factor."),
        ("with an infinite gradient", _parts(infinite=True), 0.1, kept), ("after a skipped step", _parts(), 1e6, kept),
    ):  # fmt: skip
        for weight in mine.parameters():
            weight.grad = torch.full_like(weight, 1e3) if hint == kept else None
        right.load_state_dict(mine.state_dict())  # each step by itself
        before, scaling = copy.deepcopy(right), scaler.state_dict()
        steps.clear()
        try:
            written(mine, my_optimizer, scaler, parts, largest_norm)
        except AssertionError as error:  # of the scaler
            raise Wrong(f"{case}: {error} Call its update() once, after its step().") from None
        expect(len(steps) <= 1, "one step of the optimizer", len(steps), case)
        expect(types[-1:] == [torch.bfloat16], "bfloat16 from the first layer", types[-1] if types else "no call of it")
        images, labels = map(torch.cat, zip(*parts, strict=True))
        if images.isfinite().all():
            nn.functional.cross_entropy(right(images), labels).backward()
            nn.utils.clip_grad_norm_(right.parameters(), largest_norm)
            optimizer.step()
            optimizer.zero_grad()
        moved, difference = _largest_difference(right, before), _largest_difference(mine, right)
        expected = f"the step of the whole batch, which changes a weight by up to {moved:.2g}"
        mine_moved = f"a change by up to {_largest_difference(mine, before):.2g}"
        expect(difference <= moved / 10, expected, f"{mine_moved}, which differs by {difference:.2g}", case, hint)
        expect(scaler.state_dict() != scaling, "a call of the scaler's update()", "none", case)
    return "the step of the whole batch, clipped or not, and a skipped step does no harm."


def _new_training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a small network without batch normalization, always with the same weights, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    model = nn.Sequential(*layers).to(config.device())
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine.detach() - expected.detach()).abs().max()) for mine, expected in pairs)


def _parts(infinite: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a batch in three parts, the last one smaller, brighter and of one class."""
    (first, second, last) = _batches(3)
    parts = [first, second, (4 * last[0][:2], torch.full((2,), 3))]
    if infinite:
        parts[1] = (second[0].clone().fill_(torch.inf), second[1])
    return [(images.to(config.device()), labels.to(config.device())) for images, labels in parts]


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")


@answered
def three_in_one(written: Callable) -> str:
    """Notebook 12: ``written(x, query, key, value)`` applies three linear layers to `x` with one matrix product."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(16, size) for size in (16, 16, 24)]
    for shape in ((32, 16), (2, 10, 16)):
        x, where = torch.rand(shape, requires_grad=True), f"x of shape {shape}"
        with Calls() as operators, given(where):
            found = written(x, *layers)
        expect(isinstance(found, Sequence) and len(found) == 3, "three tensors", type(found).__name__)
        for number, (mine, layer) in enumerate(zip(found, layers, strict=True), 1):
            case, right = f"{where}, result {number}", layer(x)
            expect(mine.shape == right.shape, tuple(right.shape), tuple(mine.shape), case)
            difference = float((mine - right).detach().abs().max())
            others = {f"That is what layer {of} gives.": layers[of - 1](x).detach() for of in (1, 2) if of != number}
            others["The weights are those of an earlier call."] = (2 * layer.bias - right).detach()
            said = slip(mine.detach(), {"That is without the bias.": (right - layer.bias).detach()} | others)
            expect(difference < 1e-5, "the layer's output", f"a number that differs by {difference:.2g}", case, said)
        expect(found[0].requires_grad, "results from which the weights learn", "one without gradients", where)
        sum(each.sum() for each in found).backward()
        missing = sum(weight.grad is None for layer in layers for weight in layer.parameters())
        expect(not missing, "gradients for all weights", f"{counted(missing, 'weight')} without one")
        expect(x.grad is not None, "a gradient for x", "none", where, "The layers before it must learn, too.")
        products = sum(name in PRODUCTS for name, _ in operators.calls)
        expect(products == 1, "one matrix product", products)
        for layer in layers:
            layer.weight.data.neg_()
    return "the same results and gradients, with one product instead of three."


@answered
def choose(written: Callable) -> str:
    """Notebook 13: ``written(stages, fixed, budget)`` returns the stages to recompute, at the least time, or None."""
    stages = [(60.0, 9.0), (50.0, 5.0), (40.0, 5.0), (10.0, 2.0)]  # MB that each keeps, ms to recompute it
    fewest = "Fewer stages may take more time."
    ratio = "The most MB for a ms, one after the other, may take more time."
    kept = "Count the stages that are not recomputed: those are kept."
    dropped = "What cannot be dropped takes room, too."
    for fixed, budget, right, slips in (
        (100, 261, set(), {}), (100, 155, {0, 1}, {(): kept, (3,): dropped, (0, 1, 2): ratio}),
        (100, 205, {1, 3}, {(0,): fewest, (1, 2): ratio}), (100, 260, set(), {(3,): "Exactly the budget fits."}),
        (100, 100, {0, 1, 2, 3}, {}), (300, 250, None, {}),
    ):  # fmt: skip
        case = f"stages {stages}, {fixed} MB fixed, a budget of {budget} MB"
        found = written(list(stages), fixed, budget)
        if right is None:
            expect(found is None, "None, since nothing fits", found, case)
        else:
            expect(isinstance(found, (set, frozenset)), "a set of indices", repr(found), case)
            slips |= {tuple(sorted({0, 1, 2, 3} - right)): "Return what is recomputed, not what is kept."}
            expect(found == right, right or "no stage", found or "no stage", case, slips.get(tuple(sorted(found)), ""))
    return "what is kept fits, at the least time."
