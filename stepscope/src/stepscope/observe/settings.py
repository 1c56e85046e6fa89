"""Settings of a training script that ``stepscope try`` changes from outside, in the script's process.

A change is a dict with up to four parts: arguments of the training DataLoader (``loader``), options of the optimizers
(``optimizer``), settings of PyTorch (``torch``), and changes of the network that is trained (``network``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from stepscope import thresholds
from stepscope.observe.sampler import Stack, here

Change = dict[str, dict[str, Any]]
_CALLS = "_stepscope_calls"  # attribute of a DataLoader or an optimizer: the calls that made it
_STEPSCOPE = str(Path(__file__).parents[1])
_ONLY_WITH_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
_LOW = (torch.float16, torch.bfloat16)


for_ever = ExitStack()  # what a script's process has changed; nothing is restored, since the process ends


@contextmanager
def noting(values: dict[str, Any], place: str) -> Iterator[None]:
    """Note which calls make each DataLoader and each optimizer; change arguments of the DataLoaders made at a place.

    `place` is the result of `place_of` for a DataLoader in an earlier run of the loop.
    """

    def change(calls: Stack, arguments: dict[str, Any]) -> None:
        if values and _place(calls) == place:
            arguments |= values
            if not arguments["num_workers"]:
                arguments |= _ONLY_WITH_WORKERS

    with _around_init(DataLoader, change), _around_init(Optimizer, lambda calls, arguments: None):
        yield


def line_of(made: object) -> str:
    """Return the user's line that made a DataLoader or an optimizer; "" if unknown."""
    return next((str(frame) for frame in reversed(getattr(made, _CALLS, ())) if frame.own), "")


def place_of(made: object) -> str:
    """Return a text that is equal in all runs of a script for a DataLoader that the same calls make."""
    return _place(getattr(made, _CALLS, ()))


@contextmanager
def torch_with(values: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of PyTorch within the block: `threads`, and the settings that are on or off."""
    cudnn = torch.backends.cudnn
    with ExitStack() as before:  # only what changes is read: reading TF32 can raise, see `uses_tf32`
        if "threads" in values:
            before.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(values["threads"])
        if values.get("tf32"):
            _use_tf32(before)
        if values.get("benchmark"):
            before.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = True
        if values.get("deterministic") is False:
            warns, enabled = (
                torch.is_deterministic_algorithms_warn_only_enabled(), torch.are_deterministic_algorithms_enabled()
            )  # fmt: skip
            before.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
            before.callback(torch.use_deterministic_algorithms, enabled, warn_only=warns)
            torch.use_deterministic_algorithms(False)
            cudnn.deterministic = False
        if values.get("anomaly") is False:
            before.callback(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
            torch.set_anomaly_enabled(False)
        yield


def uses_tf32() -> bool:
    """Return whether matrix products in float32 use TF32."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the script has set `fp32_precision`, from PyTorch 2.9 on: the older name then raises
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _use_tf32(before: ExitStack) -> None:
    """Use TF32 in products and convolutions, until `before` is closed."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    places: list[tuple[Any, str, object]] = [(matmul, "allow_tf32", True), (cudnn, "allow_tf32", True)]
    try:
        usual = [getattr(place, name) for place, name, _ in places]
    except RuntimeError:  # as in `uses_tf32`
        places = [(matmul, "fp32_precision", "tf32"), (getattr(cudnn, "conv", None), "fp32_precision", "tf32")]
        usual = [getattr(place, name) for place, name, _ in places]
    for (place, name, value), its in zip(places, usual, strict=True):
        before.callback(setattr, place, name, its)
        setattr(place, name, value)


def set_optimizer(optimizer: Optimizer, values: dict[str, Any]) -> Callable[[], None]:
    """Change the option `fused` of an optimizer before its first step; return a function that undoes the change."""
    changed = [group for group in optimizer.param_groups if values and "fused" in group]  # its type has this option
    before = [{name: group.get(name) for name in ("foreach", *values)} for group in changed]
    scales = getattr(optimizer, "_step_supports_amp_scaling", False)
    for group in changed:
        group |= {"foreach": False} | values
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as fused=True sets it

    def undo() -> None:
        optimizer._step_supports_amp_scaling = scales  # type: ignore[attr-defined]
        for group, its in zip(changed, before, strict=True):
            group |= its

    return undo


def can_fuse(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the option `fused`, and does not use it."""
    return not any(group.get("fused", True) for group in optimizer.param_groups)


class LossScale:
    """Scales losses for float16 as `torch.amp.GradScaler` does, but unscales gradients after each backward pass.

    So gradients that a script clips, or adds up over several passes, have their own size.
    """

    def __init__(self, weights: Callable[[], list[nn.Parameter]]):
        self.weights = weights  # of the networks that compute in float16
        self.scale: torch.Tensor | None = None
        self.found = self.growth = torch.empty(0)

    def backward(self, backward: Callable[..., None], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss."""
        if self.scale is None:
            self.scale = torch.full((), thresholds.LOSS_SCALE, device=loss.device)
            self.found = torch.zeros((), device=loss.device)
            self.growth = torch.zeros((), dtype=torch.int32, device=loss.device)
        if earlier := self._gradients(loss.device):
            torch._foreach_mul_(earlier, self.scale)
        backward(loss * self.scale, *args, **kwargs)
        if gradients := self._gradients(loss.device):
            inverse = self.scale.double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, inverse)

    def overflowed(self) -> bool:
        """Return whether a gradient is not finite: then the optimizer must not use the gradients."""
        return self.scale is not None and bool(self.found.item())

    def update(self) -> None:
        """Halve the scale after an overflow; double it after many steps without one."""
        if self.scale is not None:
            torch._amp_update_scale_(self.scale, self.growth, self.found, 2.0, 0.5, 2000)
            self.found.zero_()

    def _gradients(self, device: torch.device) -> list[torch.Tensor]:
        found = [weight.grad for weight in self.weights() if weight.grad is not None]
        return [each for each in found if each.device == device and not each.is_sparse]


class NetworkChange:
    """Changes each network that is trained, when it is called first: autocast, memory format, compilation.

    Attributes
    ----------
    changed : list of str
        Types of the changed networks.
    scale : LossScale or None
        Scales the loss, if float16 computes.
    """

    def __init__(self, values: dict[str, Any]):
        self.values, self.changed = values, list[str]()
        self.scale = LossScale(self._weights) if values.get("autocast") == "float16" else None
        self._before = list[tuple[nn.Module, dict[str, Any], bool]]()  # attributes, and whether in channels_last
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Change networks that are called first within the block."""
        if not self.values:
            yield
            return
        call = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._depth and "_stepscope_forward" not in vars(module) and trains(module):
                self._change(module)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def _change(self, network: nn.Module) -> None:
        vars(network)["_stepscope_forward"] = True
        self.changed.append(type(network).__name__)
        kept: dict[str, Any] = {
            name: vars(network)[name] for name in ("forward", "_compiled_call_impl") if name in vars(network)
        }
        self._before.append((network, kept, any(map(_in_channels_last, network.parameters()))))
        dtype, channels_last = self.values.get("autocast"), bool(self.values.get("channels_last"))
        if channels_last:
            network.to(memory_format=torch.channels_last)
        if dtype or channels_last:
            kind = getattr(torch, dtype) if dtype else None
            network.forward = partial(_forward, network.forward, _device(network), kind, channels_last)
        if self.values.get("compile"):
            network.compile()

    def _weights(self) -> list[nn.Parameter]:
        return [weight for network, *_ in self._before for weight in network.parameters()]

    def restore(self) -> None:
        """Undo the changes, in case that the loop's next run has the same networks."""
        for network, kept, channels_last in self._before:
            for name in ("_stepscope_forward", "forward", "_compiled_call_impl"):
                vars(network).pop(name, None)
            vars(network).update(kept)
            if self.values.get("channels_last") and not channels_last:
                network.to(memory_format=torch.contiguous_format)
        if self.values.get("compile"):
            torch._dynamo.reset()  # or the limit of recompilations counts those of all runs


def _forward(
    forward: Callable[..., Any], device: str, dtype: torch.dtype | None, channels_last: bool, *args: Any, **kwargs: Any
) -> Any:
    """Call a network's forward pass with images in channels_last, under autocast; return its results in float32."""
    if channels_last:
        args, kwargs = tree_map_only(torch.Tensor, _channels_last, (args, kwargs))
    with nullcontext() if dtype is None else torch.autocast(device, dtype):
        results = forward(*args, **kwargs)
    return results if dtype is None else tree_map_only(torch.Tensor, _float32, results)


def _in_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor


def trains(module: nn.Module) -> bool:
    """Return whether a module is called to train its weights."""
    training = module.training and torch.is_grad_enabled()
    return training and any(weight.requires_grad for weight in module.parameters())


def _device(network: nn.Module) -> str:
    """Return the type of the device of a network's weights."""
    weight = next(network.parameters(), None)
    return "cpu" if weight is None else weight.device.type


def autocasts() -> bool:
    """Return whether autocast is on, on a GPU or on the CPU."""
    return any(map(torch.is_autocast_enabled, ("cuda", "cpu")))


@contextmanager
def _around_init(kind: type, change: Callable[[Stack, dict[str, Any]], None]) -> Iterator[None]:
    """Within the block, call a function with the calls and the arguments before each object of a class is made."""
    init = kind.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(made: object, *args: Any, **kwargs: Any) -> None:
        calls = tuple(each for each in here() if not each.file.startswith(_STEPSCOPE) and each.package != "torch")
        bound = signature.bind(made, *args, **kwargs)
        bound.apply_defaults()
        change(calls, bound.arguments)
        init(*bound.args, **bound.kwargs)
        made.__dict__[_CALLS] = calls

    kind.__init__ = __init__  # type: ignore[misc]
    try:
        yield
    finally:
        kind.__init__ = init  # type: ignore[misc]


def _place(calls: Stack) -> str:
    return " ".join(f"{each.file}:{each.line}" for each in calls)
