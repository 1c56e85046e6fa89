"""Calculates a training step on a GPU that is not here, from the step's operators and the GPU's data sheet.

Each operator takes a time by its class: a product its operations and its bytes, any other its bytes, at the share of
the data sheet's figures that kernels of the class reach (`SHARES`). Some µs are added for each kernel. The host starts
one operator after the other, and waits for none. This is a model, not a measurement:
`elsewhere.calculated_and_measured` compares it.

The shares come from one trace of an H200, of ResNet-50 in bfloat16 and channels_last, and from its throughput in
float32. The other speeds were held out: on this H200, an A100 and a V100 nine of ten are at most 10% off. The other
one is float32 in channels_last on the V100, calculated 29% too slow: older kernels lose less there. An RTX 3090 is
calculated up to 20% too slow, as a GeForce card runs above its data sheet's clock, and ConvNeXt 25% too fast.

With few images kernels are too small for the GPU and reach less, and hosts differ. For ResNet-50 in float32 with Adam
on a V100 others measured (pytorch/benchmark, PR 706) 29.7 ms a step of one image: 16 µs of the host for an operator. In
the small network's step on the H200 it was 42 µs, on a slow core. `HOST_US` lies between them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import pandas as pd
import torch

from helpers.simulate import SimulatedDevice
from helpers.training.called_operators import Operator, record, record_without_computing
from helpers.training.training_step import TrainingStep

__all__ = [
    "GPUS", "Calculated", "Gpu", "calculate", "changes", "fused", "record", "record_without_computing", "recorded",
    "training_step",
]  # fmt: skip

PRODUCT = "products and convolutions"
#: Shares of the memory's bandwidth that kernels reach, by class: recorded on an H200, see above. A product on Tensor
#: Cores waits for its bytes at `SHARES[PRODUCT]`, more than 1 as caches hold some, and computes after that.
SHARES = {
    "elementwise": 0.9,
    "compiled": 0.9,  # what a compiler writes
    "layout": 0.9,
    "pooling": 0.2,
    "normalization": 0.73,  # of a batch, in cuDNN
    "normalization, native": 0.27,  # in PyTorch's own kernels
    "normalization, native, backward": 0.55,
    PRODUCT: 1.05,
}
#: Shares of the data sheet's peak: on Tensor Cores; without them, by memory format; the first layer, of few channels.
TENSOR_CORES, CONTIGUOUS, CHANNELS_LAST, FEW_CHANNELS = 0.9, 0.82, 0.44, 0.6
SHORTEST_US = 2.0  #: of a kernel
BETWEEN_US = 1.4  #: from the end of a kernel to the start of the next, counted as part of the kernel
HOST_US = 25.0  #: of the host's time for an operator: Python, autograd, PyTorch's dispatcher, and a launch
LAUNCH_US = 5.0  #: of it, for a launch alone: of a CUDA graph, of a compiled kernel, and of an operator's other kernels


@dataclass(frozen=True)
class Gpu:
    """A data sheet. Operations in 10¹² a second, for dense matrices, added up in float32; None if it has no units.

    For a device whose limits were measured, ``measured=True``: all kernels reach them.
    """

    name: str
    float32: float
    tf32: float | None
    bits16: float
    gb_per_second: float
    gb: int | None  #: of memory
    source: str
    bfloat16: bool = True  #: whether its Tensor Cores have it
    measured: bool = False  #: whether peak and bandwidth were measured, and do not come from a data sheet

    def peak(self, operator: Operator, tf32: bool) -> tuple[float, bool]:
        """Return the peak for an operator, and whether it runs on Tensor Cores."""
        if operator.grouped or operator.few_channels or not operator.flops:
            return self.float32, False
        if operator.dtype == torch.float16 or (operator.dtype == torch.bfloat16 and self.bfloat16):
            return self.bits16, True
        if operator.dtype == torch.float32 and tf32 and self.tf32:
            return self.tf32, True
        return self.float32, False


#: Since Ampere, NVIDIA prints figures of Tensor Cores with sparsity, too: these are without.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 8.1, None, 65, 320, 16, "NVIDIA T4 data sheet, 2019", bfloat16=False),
        Gpu("V100", 15.7, None, 125, 900, 16, "NVIDIA V100 (SXM2) data sheet, 2020", bfloat16=False),
        Gpu("A100", 19.5, 156, 312, 2039, 80, "NVIDIA A100 (80 GB SXM) data sheet, 2022"),
        Gpu("H100", 67, 494.7, 989.4, 3350, 80, "NVIDIA H100 (SXM) data sheet, 2023"),
        Gpu("H200", 67, 494.7, 989.4, 4800, 141, "NVIDIA H200 (SXM) data sheet, 2024"),
        Gpu("B200", 75, 1100, 2250, 7700, 180, "NVIDIA HGX B200 data sheet, 2025"),
        Gpu("L4", 30.3, 60.5, 121, 300, 24, "NVIDIA L4 data sheet, 2023"),
        Gpu("RTX 3090", 35.6, 35.6, 71, 936, 24, "NVIDIA GA102 white paper, 2021"),
        Gpu("RTX 4090", 82.6, 82.6, 165.2, 1008, 24, "NVIDIA Ada white paper, 2023"),
        Gpu("RTX 5090", 104.8, 104.8, 209.5, 1792, 32, "NVIDIA RTX Blackwell white paper, 2025"),
    )
}


@dataclass(frozen=True)
class Calculated:
    """A step on a GPU, calculated.

    Attributes
    ----------
    gpu : Gpu
        The data sheet.
    kernels : pandas.DataFrame
        One row per operator, in order: ``operator``, ``class`` as in `stepscope.traces.kernel_class`,
        ``kernels``, ``gflop``, ``mb``, ``ms`` on the GPU, and ``limit``: ``"compute"``, ``"memory"`` or
        ``"shortest kernel"``.
    host_ms : float
        The host's time to start them.
    graph : bool
        Whether one launch starts all kernels.
    """

    gpu: Gpu
    kernels: pd.DataFrame
    host_ms: float
    graph: bool = False

    @property
    def device(self) -> SimulatedDevice:
        """The host and the GPU with these kernels: its ``run(steps)`` has the time lines, and writes a trace."""
        kernels = []
        for row in self.kernels.itertuples():
            kernels += row.kernels * [(row.operator, row.ms * 1e3 / row.kernels)]
        launch_us = self.host_ms * 1e3 / (1 if self.graph else len(kernels))
        return SimulatedDevice(kernels, launch_us=launch_us, graph=self.graph, how=f"calculated for {self.gpu.name}")

    @cached_property
    def step_ms(self) -> float:
        """One step alone, from the first launch to the end of the last kernel."""
        return self.device.run(steps=1).end / 1e3

    @property
    def steady_ms(self) -> float:
        """One step of many: the host launches while kernels run, so the longer time decides."""
        return max(self.host_ms, self.kernels.ms.sum())

    @property
    def limit(self) -> str:
        """What decides: ``"launches"`` if they take longer than the kernels, else the limit of most kernel time."""
        return "launches" if self.steady_ms > self.kernels.ms.sum() else self.kernels.groupby("limit").ms.sum().idxmax()

    def by_operator(self) -> pd.DataFrame:
        """Return the sums by operator and limit, the longest first."""
        rows = self.kernels.groupby(["operator", "limit"], as_index=False)[["kernels", "gflop", "mb", "ms"]].sum()
        return rows.sort_values("ms", ascending=False, ignore_index=True)

    def __str__(self) -> str:
        return (
            f"{self.gpu.name}, calculated: {self.step_ms:.1f} ms a step, "
            f"a kernel in {self.kernels.ms.sum() / self.step_ms:.0%} of it, decided by {self.limit}"
        )


def calculate(
    operators: Sequence[Operator],
    gpu: str | Gpu = "H100",
    *,
    tf32: bool = True,
    compiled: bool = False,
    graph: bool = False,
) -> Calculated:
    """Calculate a step.

    Raises `ValueError` if the GPU is not known.

    Parameters
    ----------
    operators : sequence of Operator
        Of the step, as `helpers.training.called_operators` records them: with its number formats, its layout and its
        optimizer.
    gpu : str or Gpu
        One of `GPUS`, or another device.
    tf32 : bool
        Whether products in float32 may be computed in TF32.
    compiled : bool
        Whether elementwise operators that follow each other are one kernel, as `torch.compile` makes them; see `fused`.
    graph : bool
        Whether all kernels are started by one launch, as a CUDA graph.
    """
    if isinstance(gpu, str) and gpu not in GPUS:
        raise ValueError(f"Expected one of {', '.join(GPUS)}, found {gpu!r}.")
    sheet = GPUS[gpu] if isinstance(gpu, str) else gpu
    calls = fused(operators) if compiled else operators
    rows = []
    for operator in calls:
        kind = _kind(operator, compiled)
        seconds, limit = _seconds(operator, kind, sheet, tf32)
        size = operator.flops / 1e9, operator.bytes / 1e6
        rows.append((operator.name, kind.partition(",")[0], operator.kernels, *size, seconds * 1e3, limit))
    names = ["operator", "class", "kernels", "gflop", "mb", "ms", "limit"]
    kernels = sum(operator.kernels for operator in calls)
    alone = kernels if compiled else kernels - len(calls)  # a compiled step calls its kernels without autograd
    host_us = LAUNCH_US if graph else alone * LAUNCH_US + (kernels - alone) * HOST_US
    return Calculated(sheet, pd.DataFrame(rows, columns=names), host_us / 1e3, graph)


def _kind(operator: Operator, compiled: bool) -> str:
    """Return the key of `SHARES` for an operator; a compiler writes the kernels of all that it can fuse."""
    if operator.flops:
        return PRODUCT
    if compiled and operator.elementwise:
        return "compiled"
    if "batch_norm" in operator.name:
        native = ", native, backward" if "backward" in operator.name else ", native"
        return f"normalization{native if operator.native else ''}"
    return "pooling" if operator.name.startswith("max_pool") else "elementwise"


def _seconds(operator: Operator, kind: str, gpu: Gpu, tf32: bool) -> tuple[float, str]:
    """Return how long an operator's kernels take, and the limit that decides."""
    peak, tensor_cores = gpu.peak(operator, tf32)
    computing, moving = operator.flops / (peak * 1e12), operator.bytes / (gpu.gb_per_second * 1e9)
    both = max(computing, moving)
    if not gpu.measured:
        # Convolutions on Tensor Cores need adjacent channels: other tensors are transposed before and after
        turning = 2 * moving / SHARES["layout"] if tensor_cores and operator.contiguous else 0.0
        computing, moving = computing / _share(operator, tensor_cores), moving / SHARES[kind] + turning
        both = computing + moving if tensor_cores else max(computing, moving)
    limits = {"compute": computing, "memory": moving, "shortest kernel": operator.kernels * SHORTEST_US * 1e-6}
    seconds = max(both, limits["shortest kernel"])
    between = 0.0 if gpu.measured else operator.kernels * BETWEEN_US * 1e-6
    return seconds + between, max(limits, key=lambda name: limits[name])


def _share(operator: Operator, tensor_cores: bool) -> float:
    """Return the share of the peak that an operator's kernels reach."""
    if tensor_cores:
        return TENSOR_CORES
    if operator.few_channels:
        return FEW_CHANNELS
    return CHANNELS_LAST if operator.name.startswith("convolution") and not operator.contiguous else CONTIGUOUS


def fused(operators: Sequence[Operator]) -> list[Operator]:
    """Return the operators, with those joined that a compiler would make one kernel.

    An elementwise operator becomes part of the kernel that wrote the latest of its inputs, if that is elementwise, too.
    Such a kernel reads each input from elsewhere once, and writes only what others read.
    """
    groups: list[list[int]] = []
    group_of: list[int] = []
    for number, operator in enumerate(operators):
        latest = max((writer for writer, *_ in operator.read), default=-1)
        if operator.elementwise and latest >= 0 and operators[latest].elementwise:
            group_of.append(group_of[latest])
            groups[group_of[latest]].append(number)
        else:
            group_of.append(len(groups))
            groups.append([number])
    read_by: dict[tuple[int, int], set[int]] = {}
    for number, operator in enumerate(operators):
        for writer, tensor, _ in operator.read:
            read_by.setdefault((writer, tensor), set()).add(group_of[number])
    kernels = []
    for group, members in enumerate(groups):
        if len(members) == 1:
            kernels.append(operators[members[0]])
            continue
        parts = [operators[number] for number in members]
        read = {each for part in parts for each in part.read if each[0] < 0 or group_of[each[0]] != group}
        written = [each for part in parts for each in part.written if read_by.get(each[:2], {-1}) - {group}]
        name, again = " + ".join(dict.fromkeys(part.name for part in parts)), sum(part.again for part in parts)
        kernels.append(replace(parts[0], name=name, read=tuple(read), written=tuple(written), again=again))
    return kernels


def training_step(
    network: str = "resnet50",
    batch: int = 256,
    side: int = 224,
    *,
    channels_last: bool = False,
    autocast: torch.dtype | None = None,
    **optimizer: Any,
) -> Callable[[], Callable[[], object]]:
    """Return a function that builds a training step, for `record_without_computing`.

    `network` is a function of ``torchvision.models``. A step has `batch` images of `side` × `side` pixels;
    `channels_last` holds for weights and images, `autocast` is the type of mixed precision, and `optimizer` are options
    of ``torch.optim.SGD``, such as ``fused=True``.
    """

    def build() -> Callable[[], object]:
        import torchvision  # here: it takes seconds, and each notebook imports this module

        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = getattr(torchvision.models, network)(weights=None).to(memory_format=layout)
        images, labels = torch.empty(batch, 3, side, side).to(memory_format=layout), torch.zeros(batch).long()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **optimizer)
        step = TrainingStep(model, sgd, autocast)
        return lambda: step(images, labels)

    return build


@cache
def recorded(*arguments: Any, **options: Any) -> list[Operator]:
    """Return the operators of the `training_step` with these arguments; the same step is recorded once."""
    return record_without_computing(training_step(*arguments, **options))


def changes(rung: str, gpus: Sequence[str] = ("A100", "H200")) -> Iterator[tuple[str, Calculated, Calculated, int]]:
    """Calculate what the changes of a rung, ``"09"`` to ``"12"``, do to a training step of ResNet-50 on photos.

    Yields for each change and GPU the change in words, the step before and after it, and its images. Each rung keeps
    the changes of earlier rungs; of the two types of rung 11 the faster one, float16. Other rungs have none. (Of the
    A100 there are published speeds, of an H200 recorded ones.)
    """
    for change, (before, of_before), (after, of_after), images in _changes(rung):
        for gpu in gpus:
            yield change, calculate(before, gpu, **of_before), calculate(after, gpu, **of_after), images


def _changes(rung: str) -> Iterator[tuple[str, tuple, tuple, int]]:
    """Yield the changes of a rung, with the operators and the options of `calculate` before and after."""
    last, half = {"channels_last": True}, {"channels_last": True, "autocast": torch.float16}
    if rung == "09":
        yield "TF32", (recorded(), {"tf32": False}), (recorded(), {}), 256
    elif rung == "10":
        yield "channels_last, with TF32", (recorded(), {}), (recorded(**last), {}), 256
    elif rung == "11":
        yield "TF32 to bfloat16", (recorded(**last), {}), (recorded(**half | {"autocast": torch.bfloat16}), {}), 256
        yield "TF32 to float16", (recorded(**last), {}), (recorded(**half), {}), 256
    elif rung == "12":
        fused_ = recorded(**half, fused=True)
        yield "fused optimizer", (recorded(**half), {}), (fused_, {}), 256
        yield "compiled, too", (fused_, {}), (fused_, {"compiled": True}), 256
        small = recorded("resnet50", 16, 32, **half, fused=True)
        yield "CUDA graph, with a fused optimizer, of 16 images of 32 × 32", (small, {}), (small, {"graph": True}), 16
