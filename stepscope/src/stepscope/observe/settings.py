"""Settings of a training script that ``stepscope try`` changes from outside, in the script's process.

A change is a dict with up to four parts: arguments of the training DataLoader (``loader``), options of the optimizers
(``optimizer``), settings of PyTorch (``torch``), and changes of the network that is trained (``network``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from stepscope.observe.sampler import Stack, here

Change = dict[str, dict[str, Any]]
_CALLS = "_stepscope_calls"  # attribute of a DataLoader or an optimizer: the calls that made it
_STEPSCOPE = str(Path(__file__).parents[1])
_ONLY_WITH_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
_LOW = (torch.float16, torch.bfloat16)


for_ever = ExitStack()  # what a script's process has changed; nothing is restored, since the process ends


@contextmanager
def noting_loaders(values: dict[str, Any], place: str) -> Iterator[None]:
    """Note which calls make each DataLoader, and change arguments of the DataLoaders that are made at a place.

    `place` is the result of `place_of` for a DataLoader in an earlier run of the loop.
    """

    def change(calls: Stack, arguments: dict[str, Any]) -> None:
        if values and _place(calls) == place:
            arguments |= values
            if not arguments["num_workers"]:
                arguments |= _ONLY_WITH_WORKERS

    with _around_init(DataLoader, change):
        yield


@contextmanager
def noting_optimizers() -> Iterator[None]:
    """Note which calls make each optimizer."""
    with _around_init(Optimizer, lambda calls, arguments: None):
        yield


def line_of(made: object) -> str:
    """Return the user's line that made a DataLoader or an optimizer; "" if unknown."""
    return next((str(frame) for frame in reversed(getattr(made, _CALLS, ())) if frame.own), "")


def place_of(made: object) -> str:
    """Return a text that is equal in all runs of a script for a DataLoader that the same calls make."""
    return _place(getattr(made, _CALLS, ()))


@contextmanager
def torch_with(values: dict[str, Any]) -> Iterator[None]:
    """Change settings of PyTorch within the block: `threads`, and the settings that are on or off."""
    cudnn, threads, precision = torch.backends.cudnn, torch.get_num_threads(), torch.get_float32_matmul_precision()
    flags = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    if "threads" in values:
        torch.set_num_threads(values["threads"])
    if values.get("tf32"):
        torch.set_float32_matmul_precision("high")
        cudnn.allow_tf32 = True
    if values.get("benchmark"):
        cudnn.benchmark = True
    if values.get("deterministic") is False:
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic = False
    if values.get("anomaly") is False:
        torch.autograd.set_detect_anomaly(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = flags
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.set_anomaly_enabled(*anomaly)


def set_optimizer(optimizer: Optimizer, values: dict[str, Any]) -> None:
    """Change the option `fused` of an optimizer before its first step."""
    if not values:
        return
    for group in optimizer.param_groups:
        if "fused" in group:  # its type has this option
            group |= {"foreach": False} | values


def can_fuse(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the option `fused`, and does not use it."""
    return not any(group.get("fused", True) for group in optimizer.param_groups)


def unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Divide the gradients by the scale of the loss; without gradients, an optimizer skips a step that overflowed."""
    scaler.unscale_(optimizer)
    if any(found.item() for found in scaler._found_inf_per_device(optimizer).values()):
        optimizer.zero_grad(set_to_none=True)


class NetworkChange:
    """Changes each network that is trained, when it is called first: autocast, memory format, compilation.

    Attributes
    ----------
    changed : list of str
        Types of the changed networks.
    scaler : GradScaler or None
        Scales the loss, if float16 computes.
    """

    def __init__(self, values: dict[str, Any]):
        self.values, self.changed = values, list[str]()
        self.scaler = torch.amp.GradScaler(_device()) if values.get("autocast") == "float16" else None
        self._networks = list[nn.Module]()
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Change networks that are called first within the block."""
        if not self.values:
            yield
            return
        call = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._depth and "_stepscope_forward" not in vars(module) and _trains(module):
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
        self._networks.append(network)
        dtype, channels_last = self.values.get("autocast"), bool(self.values.get("channels_last"))
        if channels_last:
            network.to(memory_format=torch.channels_last)
        if dtype or channels_last:
            kind = getattr(torch, dtype) if dtype else None
            network.forward = partial(_forward, network.forward, _device(network), kind, channels_last)
        if self.values.get("compile"):
            network.compile()

    def restore(self) -> None:
        """Undo the changes, in case that the loop's next run has the same networks."""
        for network in self._networks:
            for name in ("_stepscope_forward", "forward", "_compiled_call_impl"):
                vars(network).pop(name, None)
            if self.values.get("channels_last"):
                network.to(memory_format=torch.contiguous_format)


def _forward(
    forward: Callable[..., Any], device: str, dtype: torch.dtype | None, channels_last: bool, *args: Any, **kwargs: Any
) -> Any:
    """Call a network's forward pass with images in channels_last, under autocast; return its results in float32."""
    if channels_last:
        args, kwargs = tree_map_only(torch.Tensor, _channels_last, (args, kwargs))
    with nullcontext() if dtype is None else torch.autocast(device, dtype):
        results = forward(*args, **kwargs)
    return results if dtype is None else tree_map_only(torch.Tensor, _float32, results)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor


def _trains(module: nn.Module) -> bool:
    training = module.training and torch.is_grad_enabled()
    return training and any(weight.requires_grad for weight in module.parameters())


def _device(network: nn.Module | None = None) -> str:
    """Return the type of the device of a network's weights, or of the GPU if there is one."""
    weight = None if network is None else next(network.parameters(), None)
    return weight.device.type if weight is not None else "cuda" if torch.cuda.is_available() else "cpu"


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
