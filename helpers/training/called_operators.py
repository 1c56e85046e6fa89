"""The operators that a training step calls: their operations, their bytes, and which could be fused."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# One kernel that goes through lists of tensors has at most: elements in a block, blocks, and tensors, by the number of
# lists (PyTorch 2.15 with CUDA 13, aten/src/ATen/native/cuda/MultiTensorApply.cuh; before CUDA 13 a seventh of these)
_BLOCK, _BLOCKS, _TENSORS = 65_536, 2240, (770, 448, 336, 252, 210)
_FEW_CHANNELS = 8  # fewer: Tensor Cores multiply so many at a time, or more
_READ_TWICE = {  # the first tensors, by operator
    "native_batch_norm": 1, "native_batch_norm_backward": 2, "cudnn_batch_norm": 1, "cudnn_batch_norm_backward": 2,
}  # fmt: skip
# Elementwise except for sums over a dimension: a compiler fuses these with elementwise neighbours
_NEARLY_ELEMENTWISE = {
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy", "copy_",
    "cudnn_batch_norm", "cudnn_batch_norm_backward", "mean",
    "native_batch_norm", "native_batch_norm_backward", "native_dropout", "native_layer_norm",
    "native_layer_norm_backward", "sum",
}  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """A call of an operator."""

    name: str  #: ATen's, such as ``"convolution_backward"``
    #: Floating-point operations of a convolution or a matrix product; an addition and a multiplication are two.
    flops: int
    #: For each tensor: the number of the operator that wrote it, −1 for none; its own number; its bytes. The first two
    #: are right only if nothing was computed: memory is used again.
    read: tuple[tuple[int, int, int], ...]
    written: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype  #: The type it computes with
    kernels: int = 1  #: How many a GPU starts for it
    #: Bytes that it reads a second time: batch normalization does for the mean and the variance of a batch.
    again: int = 0
    elementwise: bool = False  #: Whether a compiler can fuse it with operators before or after it
    grouped: bool = False  #: Whether it is a convolution of groups of channels, such as a depthwise one
    #: Whether it is a convolution of images whose channels lie apart in memory: not in ``channels_last``.
    contiguous: bool = False
    few_channels: bool = False  #: Whether it is a convolution of images with fewer than 8 channels, as a first layer's
    #: Whether it is batch normalization that a GPU does in PyTorch's own kernels, and not in cuDNN's.
    native: bool = False

    @property
    def bytes(self) -> int:
        """Bytes read and written, if each tensor comes from or goes to memory."""
        return sum(size for _, _, size in (*self.read, *self.written)) + self.again


def record(step: Callable[[], object]) -> list[Operator]:
    """Run a step once, and return the operators that it calls, without those that touch no element.

    Operators that `torch.compile` has fused, and CUDA graphs, are invisible: give the step without them.
    """
    with _Recorder(keep=False) as recorder:
        step()
    return recorder.operators


def record_without_computing(build: Callable[[], Callable[[], object]]) -> list[Operator]:
    """Return the operators of a step that is too large for this machine: nothing is computed, and no memory taken.

    The step runs once, from weights without gradients; the optimizer's state exists before, as in any later step.

    Parameters
    ----------
    build : callable
        Makes the model, the optimizer and a batch, on the CPU, and returns the step, which takes no argument. Tensors
        in it have shapes, but no values: asking for one, as with ``.item()``, raises an error. Its optimizer goes
        through all weights at once (``foreach``), as on a GPU, unless `build` says otherwise.
    """
    recorder, prepared = _Recorder(keep=True), set()

    def prepare(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        if optimizer not in prepared:
            prepared.add(optimizer)
            recorder.paused = True
            optimizer.step()  # makes its state: the step that is recorded finds it
            recorder.paused = False

    mode = FakeTensorMode()
    # Module.to() refuses weakly kept tensors
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    hook = register_optimizer_step_pre_hook(prepare)
    try:
        # It asks for a value to check its arguments
        with mode, mock.patch("torch.nn.init.trunc_normal_", lambda tensor, *_, **__: tensor):
            step = build()
            with recorder:
                step()
    finally:
        hook.remove()
    return recorder.operators


class Calls(TorchDispatchMode):
    """Lists the operators called in a ``with`` statement, after autograd and autocast have done their part.

    `calls` has for each its name, and the first tensor that it returns, without values; None if it returns none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.Tensor | None]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        first = next((each.to("meta") for each in _tensors(result)), None)
        self.calls.append((operator._overloadpacket.__name__, first))
        return result


class _Recorder(TorchDispatchMode):
    def __init__(self, keep: bool):
        super().__init__()
        self.operators: list[Operator] = []
        self.paused = False  # while it is, operators run and are not listed
        self._keep = keep
        self._kept: list[torch.Tensor] = []  # without values tensors are kept, so that no two have the same `id`
        self._writers: dict[int, int] = {}  # of a tensor, by its `id`
        self._viewed: dict[int, int] = {}  # the base of a view

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if self.paused:
            return result
        name, lists = operator._overloadpacket.__name__, [each for each in args if isinstance(each, (list, tuple))]
        read, written = _tensors((args, kwargs)), _tensors(result)
        at_once = name.startswith(("_foreach", "_fused"))
        if any(each.alias_info and not each.alias_info.is_write for each in operator._schema.returns):
            self._viewed |= {id(view): self._base(read[0]) for view in written}
            self._kept += written if self._keep else []
        elif at_once or (written and "empty" not in name and name not in ("_unsafe_view", "detach")):
            written = written or _tensors(args[0])
            forward, backward = name == "convolution", name == "convolution_backward"
            images = [each for each in read if each.ndim == 4] if forward or backward else []
            weight = args[2 if backward else 1] if images else None
            number = len(self.operators)
            self.operators.append(
                Operator(
                    name,
                    _flops(operator, args, kwargs or {}, result),
                    tuple(self._numbered(read)),
                    tuple((number, self._base(each), each.nbytes) for each in written),
                    next((each.dtype for each in read if each.is_floating_point()), torch.float32),
                    kernels=_kernels(lists) if at_once else len(written) if backward else 1,
                    again=sum(each.nbytes for each in read[: _READ_TWICE.get(name, 0)]),
                    elementwise=not at_once and (torch.Tag.pointwise in operator.tags or name in _NEARLY_ELEMENTWISE),
                    grouped=(forward and args[8] > 1) or (backward and args[9] > 1),
                    contiguous=bool(images) and not _in_channels_last(max(images, key=torch.numel)),
                    few_channels=weight is not None and weight[0].shape[0] < _FEW_CHANNELS,
                    native=name.startswith("native_batch_norm") and not _by_cudnn(read[1 if "back" in name else 0]),
                )
            )
            self._writers |= {self._base(each): number for each in written}
            self._kept += [*read, *written] if self._keep else []
        return result

    def _base(self, tensor: torch.Tensor) -> int:
        return self._viewed.get(id(tensor), id(tensor))

    def _numbered(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int]]:
        for tensor in tensors:
            base = self._base(tensor)
            yield self._writers.get(base, -1), base, tensor.nbytes


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _in_channels_last(images: torch.Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


def _by_cudnn(images: torch.Tensor) -> bool:
    """Return whether PyTorch has cuDNN normalize such images on a GPU.

    A build for GPUs is asked. Any other is taken to do as PyTorch 2.15 for CUDA: bfloat16 it normalizes itself.
    """
    if torch.backends.cudnn.version() is None:
        return images.dtype != torch.bfloat16
    return _selects_cudnn(images.shape, images.dtype, _in_channels_last(images))


@cache
def _selects_cudnn(shape: torch.Size, dtype: torch.dtype, channels_last: bool) -> bool:
    with FakeTensorMode():
        images = torch.empty(shape, dtype=dtype, device="cuda")
        images = images.to(memory_format=torch.channels_last) if channels_last else images
        values = torch.empty(shape[1], device="cuda")  # weight and bias, and the running means and variances
        backend = torch._C._select_batch_norm_backend(images, *[values] * 4, True, 1e-5)
    return backend.name != "Native"


def _flops(operator: torch._ops.OpOverload, args: Sequence, kwargs: dict, result: object) -> int:
    """Return the operations of a call, by PyTorch's formulas.

    For a convolution's backward they would ignore groups of channels: it does the forward's operations once for the
    gradient of the image, and once for that of the weight.
    """
    packet = operator._overloadpacket
    if packet.__name__ == "convolution_backward":
        gradient, image, weight = args[:3]
        each = (image if args[7] else gradient).numel() * weight[0].numel()
        return 2 * each * sum(map(bool, args[-1][:2]))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def _kernels(lists: Sequence[Sequence]) -> int:
    """Return how many kernels go through lists of tensors at once."""
    lists = [each for each in lists if each and isinstance(each[0], torch.Tensor)]
    blocks = sum(math.ceil(each.numel() / _BLOCK) for each in lists[0])
    most = _TENSORS[min(len(lists), len(_TENSORS)) - 1]
    return max(math.ceil(len(lists[0]) / most), math.ceil(blocks / _BLOCKS))
