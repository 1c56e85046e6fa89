"""Fewer launches: what `torch.compile` costs the first time and where it cannot work; a step as a CUDA graph."""

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from helpers import config
from stepscope import timing


class CannotCompile(RuntimeError):
    """This machine lacks what `torch.compile` needs; made from PyTorch's error."""

    def __init__(self, raised: Exception):
        first_line = str(raised).strip().splitlines()[0]
        super().__init__(
            f"torch.compile cannot work here: {first_line}\n"
            "It needs a C++ compiler, on a GPU also Triton, which comes with PyTorch for CUDA on Linux. Install it: "
            "`apt install g++` (Debian, Ubuntu), `xcode-select --install` (macOS), or the C++ build tools of Visual "
            "Studio (Windows, and start from their prompt). Then restart the kernel. All else here works without it."
        )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Give `torch.compile` an empty cache, as on a new machine, while the block runs.

    A temporary cache replaces the compiler's cache on disk, which is left alone. Functions that were compiled in the
    block can be called afterwards. What the compiler finds out about this processor stays: it compiles and loads small
    programs for that, once on a machine.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # not at the top: the compiler takes a second to import
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.utils import fresh_cache

    if not torch.cuda.is_available():
        # It warns that a CUDA toolkit is useless without a GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        with suppress(InvalidCxxCompiler):  # `first_step` raises an error that says what to install
            pick_vec_isa()
    with fresh_cache():
        yield


def first_step(step: timing.Step, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Run a compiled step for the first time, and return the seconds that it took, its compilation included.

    Earlier compilations in this process are forgotten; the cache on disk is used. Raises `CannotCompile` if there is no
    compiler, or none for this GPU.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, GPUTooOldForTriton, InvalidCxxCompiler, TritonMissing

    torch.compiler.reset()
    start = time.perf_counter()
    try:
        step(images, labels)
    except (BackendCompilerFailed, TritonMissing, GPUTooOldForTriton) as error:
        reason = getattr(error, "inner_exception", error)
        lacking = isinstance(reason, InvalidCxxCompiler | CppCompileError | TritonMissing | GPUTooOldForTriton)
        if lacking or "C compiler" in str(reason):  # as Triton says it
            raise CannotCompile(reason) from error
        raise
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


# Check before each replay that everything the graph uses still exists: 0.1 ms of host time for a ResNet-50
_MAY_CHECK = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters
_CHECKED: dict[str, Any] = {"check_input_liveness": True} if _MAY_CHECK else {}


def graphed(
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], images: torch.Tensor, labels: torch.Tensor
) -> timing.Step:
    """Record one training step as a CUDA graph, and return a step that replays it: one launch instead of thousands.

    First `step` trains three times on the given batch, on a stream of its own, as PyTorch's notes on CUDA graphs ask
    for: the set-up that libraries do in their first calls must not be recorded. The recording itself trains nothing.

    A graph runs the same kernels on the same memory every time. So each batch is copied to the place of the first one,
    all batches have the same shape, and nothing in the step may depend on a tensor's value: no enabled gradient scaler,
    no ``.item()``. Adam and AdamW need ``capturable=True``. The returned step keeps the recorded one as its attribute
    ``step``, because a graph keeps no tensor alive: replays would go on writing to memory that other tensors use by
    then.

    Raises
    ------
    ValueError
        By the returned step, if a batch has another shape.
    RuntimeError
        By the returned step, from PyTorch 2.13 on: if a tensor that the graph uses has been freed, for instance
        because the optimizer has loaded another state.
    """
    device = config.device()
    its_images, its_labels = images.to(device, copy=True), labels.to(device, copy=True)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            step(its_images, its_labels)
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **_CHECKED):
        loss = step(its_images, its_labels)

    def replay(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if images.shape != its_images.shape:
            raise ValueError(f"Expected images of shape {tuple(its_images.shape)}, found {tuple(images.shape)}.")
        its_images.copy_(images, non_blocking=True)
        its_labels.copy_(labels, non_blocking=True)
        graph.replay()
        return loss.clone()  # the next replay overwrites this one's

    replay.step = step  # type: ignore[attr-defined]  # keeps the weights, the optimizer and its state
    return replay
