"""Number formats: what fits into them, which of them operators use, and what rounding to them does to gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Format:
    """A format of floating-point numbers: a sign, an exponent and a mantissa, as IEEE 754 lays them out.

    Attributes
    ----------
    name : str
    exponent, mantissa : int
        Bits of each; the sign has one.
    """

    name: str
    exponent: int
    mantissa: int

    @property
    def largest(self) -> float:
        """Largest finite number; what is larger becomes infinite."""
        return (2 - self.spacing) * 2.0 ** (2 ** (self.exponent - 1) - 1)

    @property
    def smallest_normal(self) -> float:
        """Smallest number that has all bits of the mantissa; what is smaller loses them one by one."""
        return 2.0 ** (2 - 2 ** (self.exponent - 1))

    @property
    def smallest(self) -> float:
        """Smallest number above 0; what is at most half of it becomes 0."""
        return self.smallest_normal * self.spacing

    @property
    def spacing(self) -> float:
        """From 1 to the next larger number."""
        return 2.0**-self.mantissa

    @property
    def range(self) -> tuple[float, float, float]:
        """Smallest number above 0, smallest with full precision, largest."""
        return self.smallest, self.smallest_normal, self.largest


#: TF32 is no type of PyTorch: it is how Tensor Cores read a float32, in its place in memory.
FORMATS = (Format("float32", 8, 23), Format("TF32", 8, 10), Format("bfloat16", 8, 7), Format("float16", 5, 10))
FLOAT16 = FORMATS[-1]


def operator_types(call: Callable[[], object]) -> pd.DataFrame:
    """Return which types the operators gave that `call` ran: a row an operator, a column a type, how often.

    Forward and backward count, as far as `call` runs them. Operators that give no floating-point tensor are left out.
    """
    with _Types() as seen:
        call()
    table = pd.Series(seen.counts, dtype=int).rename_axis(["operator", "type"]).unstack(fill_value=0)
    return table.loc[table.sum(axis="columns").sort_values(ascending=False, kind="stable").index]


class _Types(TorchDispatchMode):
    """Sees every operator after autograd and autocast have done their part."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            self.counts[operator.overloadpacket.__name__, str(first.dtype).removeprefix("torch.")] += 1
        return result


def gradients(model: nn.Module, loss: Callable[[], torch.Tensor], every: int = 7) -> dict[str, torch.Tensor]:
    """Return gradients of a loss: those of the weights, and those that flow back from layer to layer.

    The weights of `model` and their own gradients stay as they are.

    Parameters
    ----------
    model : Module
    loss : callable
        Runs `model` forward and returns the loss, of shape ().
    every : int
        How many elements to go on for one to keep; a ResNet-50 has too many.

    Returns
    -------
    dict of str to Tensor
        ``"weights"`` and ``"activations"``, each float32, shape (elements,), on the CPU.
    """
    flowing = []
    handles = _at_every_layer(model, lambda gradient: flowing.append(gradient.flatten()[::every].float().cpu()))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        of_weights = torch.autograd.grad(loss(), weights)
    finally:
        _remove(handles)
    of_weights = torch.cat([gradient.flatten()[::every].float().cpu() for gradient in of_weights])
    return {"weights": of_weights, "activations": torch.cat(flowing)}


def lost(gradients: torch.Tensor, scale: float, dtype: torch.dtype = torch.float16) -> tuple[float, float]:
    """Return which shares of `gradients`, times `scale`, become 0 and infinite when rounded to `dtype`, each 0 to 1.

    Gradients that are 0 already do not count.
    """
    rounded = (gradients[gradients != 0].double() * scale).to(dtype)
    return (rounded == 0).double().mean().item(), rounded.isinf().double().mean().item()


def round_gradients(model: nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """From now on, round every gradient in `model` to `dtype` where it leaves a layer, and each weight's gradient.

    The layers go on computing as before, so this is what the *format* does to gradients, on any device.

    Returns
    -------
    list of RemovableHandle
        ``handle.remove()`` ends it.
    """
    def rounded(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(dtype).to(gradient.dtype)

    return [*_at_every_layer(model, rounded), *(weight.register_hook(rounded) for weight in model.parameters())]


def _at_every_layer(model: nn.Module, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> list[RemovableHandle]:
    """Call `hook` with the gradient of what each layer of `model` gives, whenever it is computed."""

    def watch(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    return [layer.register_forward_hook(watch) for layer in model.modules() if not list(layer.children())]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
