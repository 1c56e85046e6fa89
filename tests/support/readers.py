"""Readers who execute notebooks on one machine at the same time, as a class does."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from support.notebooks import environment

from helpers.lessons.execute import ThisInterpreter


@dataclass
class Reader:
    """One of them, afterwards.

    Attributes
    ----------
    runs : Path
        Own folder of traces and results.
    finished : list of str
        Names of the notebooks that came to their end.
    error : str
        What stopped the reader, if something did.
    seconds : float
        From the common start to the end.
    memory : int
        Bytes, at the most, of the Jupyter kernel and all that it started; what several processes share, such as
        libraries, is divided among them.
    """

    runs: Path
    finished: list[str]
    error: str = ""
    seconds: float = 0.0
    memory: int = 0


def at_once(people: int, notebooks: Sequence[Path], folder: Path, **variables: str) -> tuple[list[Reader], int]:
    """Execute notebooks for so many readers, who begin at the same moment and share the images, which nobody prepared.

    Parameters
    ----------
    people : int
    notebooks : sequence of Path
    folder : Path
        Empty; gets ``data``, and for each reader ``runs-1`` and so on.
    **variables
        More environment variables.

    Returns
    -------
    readers : list of Reader
    memory : int
        Bytes of all of them together, when it was most.
    """
    readers = [Reader(folder / f"runs-{number + 1}", []) for number in range(people)]
    settings = [environment(folder / "data", reader.runs) | variables for reader in readers]
    return readers, asyncio.run(_class(readers, notebooks, settings))


async def _class(readers: list[Reader], notebooks: Sequence[Path], settings: list[dict[str, str]]) -> int:
    kernels: dict[int, NotebookClient] = {}
    working = asyncio.gather(
        *(_work(number, reader, notebooks, settings[number], kernels) for number, reader in enumerate(readers))
    )
    most = 0
    while not working.done():
        start = time.monotonic()
        now = await asyncio.to_thread(lambda: {number: _memory(client) for number, client in list(kernels.items())})
        for number, memory in now.items():
            readers[number].memory = max(readers[number].memory, memory)
        most = max(most, sum(now.values()))
        await asyncio.wait([working], timeout=2 + 9 * (time.monotonic() - start))  # or looking takes a core
    await working
    return most


async def _work(
    number: int,
    reader: Reader,
    notebooks: Sequence[Path],
    variables: dict[str, str],
    kernels: dict[int, NotebookClient],
) -> None:
    start = time.monotonic()
    try:
        for notebook in notebooks:
            client = NotebookClient(
                nbformat.read(notebook, as_version=4),
                kernel_manager_class=ThisInterpreter,
                kernel_name="python3",
                timeout=None,
                startup_timeout=1200,  # s; with one core for fifteen kernels
                resources={"metadata": {"path": str(notebook.parent)}},
            )
            kernels[number] = client
            await client.async_execute(env=variables)
            reader.finished.append(notebook.stem)
    except Exception as error:  # of any kind: it is reported, and the others go on
        reader.error = f"{notebook.stem}: {error}"
    kernels.pop(number, None)
    reader.seconds = time.monotonic() - start


def _memory(client: NotebookClient) -> int:
    """Return the bytes of a kernel and its descendants: pages that processes share are divided, swapped ones count."""
    total = 0
    with suppress(psutil.Error, AttributeError):  # the kernel has not started yet, or has just ended
        kernel = psutil.Process(client.km.provisioner.process.pid)
        for process in [kernel, *kernel.children(recursive=True)]:
            with suppress(psutil.Error):
                full = process.memory_full_info()
                total += full.pss + full.swap
    return total
