"""What `torch.compile` costs the first time, its cache emptied, and what to do where it cannot work."""

from __future__ import annotations

import atexit
import getpass
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from helpers import timing


class CannotCompile(RuntimeError):
    """This machine lacks what `torch.compile` needs.

    Parameters
    ----------
    found : Exception
        What PyTorch raised.
    """

    def __init__(self, found: Exception):
        first_line = str(found).strip().splitlines()[0]
        super().__init__(
            f"torch.compile cannot work here: {first_line}\n"
            "It needs a C++ compiler, on a GPU also Triton, which comes with PyTorch for CUDA on Linux. To have one: "
            "`apt install g++` (Debian, Ubuntu), `xcode-select --install` (macOS), or the C++ build tools of Visual "
            "Studio (Windows, and start from their prompt). Then restart the kernel. All else here works without."
        )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Let `torch.compile` find nothing that it compiled before, as on a new machine, while the block runs.

    What the compiler makes it keeps on disk, by default in the folder for temporary files, and so costs less the second
    time. That cache is left alone; one of our own takes its place, and is deleted at the end. What was compiled in the
    block can be called afterwards.
    """
    _leave_the_folder_of_others()
    from torch._inductor.utils import fresh_cache  # not at the top: the compiler takes a second to import

    with fresh_cache():
        yield


def first_step(step: timing.Step, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Run a compiled step for the first time, and return the seconds that it took, its compilation included.

    What had been compiled in this process before is forgotten; what is in the cache on disk is used.

    Raises
    ------
    CannotCompile
        If there is no compiler, or none for this GPU.
    """
    _leave_the_folder_of_others()
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, GPUTooOldForTriton, InvalidCxxCompiler, TritonMissing

    if not torch.cuda.is_available():  # it then warns that a CUDA toolkit is of no use without a GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch.compiler.reset()
    start = time.perf_counter()
    try:
        step(images, labels)
    except (TritonMissing, GPUTooOldForTriton) as error:
        raise CannotCompile(error) from error
    except BackendCompilerFailed as error:
        reason = error.inner_exception
        lacking = isinstance(reason, InvalidCxxCompiler | CppCompileError | TritonMissing | GPUTooOldForTriton)
        if lacking or "C compiler" in str(reason):  # as Triton says it
            raise CannotCompile(reason) from error
        raise
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _leave_the_folder_of_others() -> None:
    """Where the compiler's folder is another user's, give this process a folder of its own for temporary files.

    The compiler names its folder after the user, by variables that `su` and `sudo -E` leave as they were: what root
    compiled then, nobody else may write. Its place can be set, but parts of it stay in the folder for temporary files.
    To be called before the compiler is imported, which then remembers its folder.
    """
    try:
        usual = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    except (KeyError, ImportError, OSError):  # a user without a name, as in some containers
        return
    folders = [usual, *(Path(place, name) for place, names, _ in os.walk(usual) for name in names)]
    if usual.exists() and not all(os.access(folder, os.W_OK) for folder in folders):
        own = tempfile.mkdtemp(prefix="compiling-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        tempfile.tempdir = os.environ["TMPDIR"] = own
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == str(usual):  # as torchvision leaves it when it is imported
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
