"""Checks of notebooks 08 to 13: copies to the device, memory formats, mixed precision, launches, memory."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers import config
from helpers.lessons.checks.answering import Wrong, answered, expect, expect_number, given, slip
from helpers.training.called_operators import Calls


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
    hint = "Neither `detach` nor `no_grad` may stand on the way."
    expect(found.requires_grad, "a result from which weight and bias learn", "one without gradients", hint=hint)
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


@answered
def one_linear(written: Callable) -> str:
    """Notebook 12: ``written(query, key, value)`` returns one linear layer that gives the outputs of all three."""
    for sizes in ((16, 16, 16), (16, 16, 24)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers, x = [nn.Linear(12, size) for size in sizes], torch.rand(2, 10, 12)
        before, case = copy.deepcopy(layers), f"layers with {sizes} outputs"
        with given(case):
            found = written(*layers)
        expect(isinstance(found, nn.Linear), "one nn.Linear", type(found).__name__, case)
        shapes = tuple(found.weight.shape), (sum(sizes), 12)
        expect(shapes[0] == shapes[1], f"a weight of shape {shapes[1]}", shapes[0], case)
        with torch.no_grad():
            right = torch.cat([layer(x) for layer in before], dim=-1)
            without = torch.cat([x @ layer.weight.T for layer in before], dim=-1)
            mine = found(x)
        difference = float((mine - right).abs().max())
        apart = f"a number that differs by {difference:.2g}"
        hint = slip(mine, {"That is without the bias.": without}, "Query's outputs come first, then key and value.")
        expect(difference < 1e-5, "the three outputs side by side", apart, case, hint)
        learning = sum(weight.requires_grad for weight in found.parameters())
        expect(learning == 2, "a new layer whose weight and bias learn", f"{learning} of 2 that learn", case)
        pairs = zip(layers, before, strict=True)
        kept = all(torch.equal(mine.weight, other.weight) for mine, other in pairs)
        expect(kept, "three layers that stay as they are", "a changed weight", case)
    return "one layer, one product, and the outputs of all three."


@answered
def recompute_halves(written: Callable) -> str:
    """Notebook 13: ``written(network, x)`` returns ``network(x)``, and forward keeps the inputs of two halves only."""
    for count, learns in ((8, False), (8, True), (7, True)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [layer for _ in range(count) for layer in (nn.Linear(16, 16), nn.Tanh())][:count]
        mine, right = nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers))
        x, its_x = (torch.ones(32, 16, requires_grad=learns) for _ in range(2))
        case = f"{count} layers, {'an' if learns else 'no'} input that learns"
        with given(case):
            found, kept = _kept(mine, partial(written, mine, x))
        expect(isinstance(found, torch.Tensor), "a tensor", type(found).__name__, case)
        expected, all_kept = _kept(right, partial(right, its_x))
        expect(torch.allclose(found, expected), "the result of network(x)", "another one", case)
        hint = "With use_reentrant=True a part learns only if its input has gradients."
        expect(found.requires_grad, "a result from which the weights learn", "one without gradients", case, hint)
        found.sum().backward()
        expected.sum().backward()
        pairs = zip((*mine.parameters(), x), (*right.parameters(), its_x), strict=True)
        wrong = sum(not _alike(one.grad, other.grad) for one, other in pairs)
        hint = "Before a detach() nothing learns."
        expect(not wrong, "the gradients of network(x)", f"{wrong} wrong or missing", case, hint)
        slips = {
            all_kept: "Nothing is computed again.",
            x.nbytes: "One part alone: in backward all its activations exist at the same time.",
        }
        hint = slips.get(kept, "Each half is one part; a part of one layer saves nothing.")
        expect(kept == 2 * x.nbytes, f"{2 * x.nbytes} kept bytes, of two inputs", kept, case, hint)
    return "the same result and gradients, and only two inputs are kept."


def _kept(network: nn.Module, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the result of a forward pass, and the bytes that it keeps, without weights."""
    own, kept = {weight.untyped_storage()._cdata for weight in network.parameters()}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(size for storage, size in kept.items() if storage not in own)


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.allclose(one, other)
