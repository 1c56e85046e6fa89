"""Number formats: what fits into them, how fast training in them is here, which operators use them, what they lose."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from helpers import config
from helpers.training.called_operators import Calls
from stepscope import timing
from stepscope.base import terminal


@dataclass(frozen=True)
class Format:
    """A format of floating-point numbers: a sign, an exponent and a mantissa, as IEEE 754 lays them out."""

    name: str
    exponent: int  #: its bits
    mantissa: int  #: its bits; the sign has one

    @property
    def largest(self) -> float:
        """Largest finite number; larger numbers become infinite."""
        return (2 - self.spacing) * 2.0 ** (2 ** (self.exponent - 1) - 1)

    @property
    def smallest_normal(self) -> float:
        """Smallest number that has all bits of the mantissa; smaller ones lose them one by one."""
        return 2.0 ** (2 - 2 ** (self.exponent - 1))

    @property
    def smallest(self) -> float:
        """Smallest number above 0; numbers up to half of it become 0."""
        return self.smallest_normal * self.spacing

    @property
    def spacing(self) -> float:
        """Distance from 1 to the next number."""
        return 2.0**-self.mantissa


#: TF32 is not a type of PyTorch: it is how Tensor Cores read a float32, which stays one in memory.
FORMATS = (Format("float32", 8, 23), Format("TF32", 8, 10), Format("bfloat16", 8, 7), Format("float16", 5, 10))
FLOAT16 = FORMATS[-1]

_TOO_SLOW = 3.0  # times as long as usual: too slow to train in
_FIRST_PART = 16  # of a batch, or two images: batch normalization needs more than one


@dataclass(frozen=True)
class Trial:
    """What `try_step` measured."""

    images: int  #: in the largest batch that was tried
    of: int  #: images in the batch to train with
    ms: float  #: of a step with the images that were tried
    usual_ms: float  #: of a usual step with all images
    baseline: str  #: what the usual step computes in
    affordable: int  #: images in the largest batch whose step took at most three times `usual_ms`; 0 if none did

    @property
    def ratio(self) -> float:
        """How many times as long as a usual step; a lower bound if not all images were tried."""
        return self.ms / self.usual_ms

    @property
    def fast_enough(self) -> bool:
        """Whether a step with all images was tried and takes at most three times as long as usual."""
        return self.images == self.of and self.ratio <= _TOO_SLOW

    @property
    def faster(self) -> bool:
        """Whether a step with all images was tried and takes less time than usual."""
        return self.images == self.of and self.ratio < 1

    def __str__(self) -> str:
        usual = f"{self.ratio:.2f} times as long as all {self.of} in {self.baseline} ({self.usual_ms:,.0f} ms)"
        text = f"a step of {self.images} images takes {self.ms:,.0f} ms, {usual}"
        if self.fast_enough:
            return f"{text}."
        if self.ratio > _TOO_SLOW:
            return f"{text}: too slow to train in here."
        return f"{text}. More images would take too long to try: not trained in here."


def try_step(
    step: Callable[[torch.Tensor, torch.Tensor], object], batch: tuple, usual_ms: float, baseline: str = "float32"
) -> Trial:
    """Find out whether a training step is fast enough, within ``longest_comparison`` of the preset.

    The step itself is timed, forward, backward and optimizer: first with a sixteenth of the batch (two images at
    least), then with twice as many, and so on, until a part takes longer than three usual steps with the whole.

    Parameters
    ----------
    step : callable
        Called with images and labels; it trains. It is called twice with each part, if there is time for it, and the
        faster call counts.
    batch : tuple of Tensor
        Images, shape (N, …), and labels, shape (N,), of the batch to train with.
    usual_ms : float
        Milliseconds of the usual step with this batch, the lowest of a few; `baseline` is what it computes in.
    """
    deadline = time.perf_counter() + config.preset().longest_comparison
    whole, affordable = len(batch[0]), 0
    images = min(max(whole // _FIRST_PART, 2), whole)
    bar = terminal.bar("trying a type", "image", whole, delay=3)
    while True:
        part = [tensor[:images] for tensor in batch]
        ms = _step_ms(step, part)
        if time.perf_counter() + ms / 1e3 <= deadline:  # once more: the machine may be busy, and the first call slow
            ms = min(ms, _step_ms(step, part))
        if ms > _TOO_SLOW * usual_ms:
            break
        bar.update(images - affordable)
        affordable = images
        if images == whole or time.perf_counter() + 4 * ms / 1e3 > deadline:  # two calls with twice the images
            break
        images = min(2 * images, whole)
    bar.close()
    return Trial(images, whole, ms, usual_ms, baseline, affordable)


def _step_ms(step: Callable, batch: list[torch.Tensor]) -> float:
    return timing.call_ms(lambda: step(*batch), repeats=1, warmup=0)


def operator_types(call: Callable[[], object]) -> pd.DataFrame:
    """Return how often the operators that `call` ran gave each type: a row per operator, a column per type.

    Forward and backward count, if `call` runs them. Operators that give no floating-point tensor are left out.
    """
    with Calls() as seen:
        call()
    given = [(name, result.dtype) for name, result in seen.calls if result is not None]
    counts = Counter((name, str(dtype).removeprefix("torch.")) for name, dtype in given if dtype.is_floating_point)
    table = pd.Series(counts, dtype=int).rename_axis(["operator", "type"]).unstack(fill_value=0)
    return table.loc[table.sum(axis="columns").sort_values(ascending=False, kind="stable").index]


def gradients(model: nn.Module, loss: Callable[[], torch.Tensor], every: int = 7) -> dict[str, torch.Tensor]:
    """Return gradients of a loss: those of the weights, and those that flow back from layer to layer.

    `loss` runs `model` forward and returns the loss, of shape (). The weights of `model` and their own gradients stay
    as they are. Returns ``"weights"`` and ``"activations"``, each float32, shape (elements,), on the CPU; of `every`
    so many elements it keeps one, since a ResNet-50 has too many.
    """
    flowing = []

    def keep(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flatten()[::every].float().cpu()

    def watch(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: flowing.append(keep(gradient)))

    handles = [layer.register_forward_hook(watch) for layer in _layers(model)]
    try:
        of_weights = torch.autograd.grad(loss(), [weight for weight in model.parameters() if weight.requires_grad])
    finally:
        for handle in handles:
            handle.remove()
    return {"weights": torch.cat([keep(gradient) for gradient in of_weights]), "activations": torch.cat(flowing)}


def lost(gradients: torch.Tensor, scale: float) -> tuple[float, float]:
    """Return which shares of `gradients`, times `scale`, become 0 and infinite when rounded to float16, each 0 to 1.

    Gradients that are 0 already do not count.
    """
    rounded = (gradients[gradients != 0].double() * scale).half()
    return (rounded == 0).double().mean().item(), rounded.isinf().double().mean().item()


def round_layers(model: nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """From now on, round to `dtype` what each layer of `model` returns, and all gradients.

    The layers go on computing as before, so this shows the effect of the *format* on training, on any device. Call
    ``remove()`` of each returned handle to end it.
    """

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).to(tensor.dtype)  # autograd sends the gradient the same way back

    of_layers = [layer.register_forward_hook(lambda layer, inputs, output: rounded(output)) for layer in _layers(model)]
    return [*of_layers, *(weight.register_hook(rounded) for weight in model.parameters())]


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if not list(layer.children())]
