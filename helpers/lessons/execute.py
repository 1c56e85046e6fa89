"""Executes the notebooks in order, without a browser, and says how long that takes."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter

from helpers import config
from helpers.results import hardware, scoreboard
from stepscope.base import machine, staging, terminal, wording

NOTEBOOKS = config.PROJECT / "notebooks"
RUN_TIMES = config.PROJECT / "data" / "reference" / "run-times.json"
FURTHER = "## Going further"  # the heading after a notebook's core

# The page must open without internet, so it loads nothing from elsewhere.
OFFLINE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}"""


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the running interpreter, whatever the machine has registered under the kernel's name."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


class NotebookFailed(RuntimeError):
    """A cell of a notebook raised an error, or its kernel died."""


def run(notebooks: Sequence[Path] | None = None, images: str | None = None, core: bool = False) -> dict[str, float]:
    """Execute notebooks in order, by default all, each in its own kernel; print the ladder, return the seconds.

    With `core` only the core of each is executed.

    Each notebook, also one that fails, is written as an HTML page into ``html`` below ``COURSE_RUNS``. For the site, a
    notebook that does not fail is kept there, too, with its outputs and what they were measured on: `images` says where
    the images come from. Raises `NotebookFailed` if a cell raises an error or its kernel dies: no later notebook is
    executed then.
    """
    notebooks = all_notebooks() if notebooks is None else notebooks
    folder = pages()
    what = "cores of notebooks" if core else "notebooks"
    print(f"Preset {config.preset().name}: {len(notebooks)} {what}. Pages go to {folder}.", flush=True)
    seconds = {}
    for notebook in notebooks:
        start = time.perf_counter()
        try:
            executed = execute(notebook, folder / f"{notebook.stem}.html", core)
        except KeyboardInterrupt:
            print(f"\nInterrupted in {notebook.stem}. The pages before it are in {folder}.", flush=True)
            raise
        seconds[notebook.stem] = round(time.perf_counter() - start, 1)
        print(f"{notebook.stem}: {seconds[notebook.stem]:.0f} s", flush=True)
        executed.metadata["course"] = {
            "machine": config.describe(),
            "processor": hardware.describe()["processor"],
            "preset": config.preset().name,
            "images": images,
            "date": datetime.date.today().isoformat(),
        }
        staging.write(folder / notebook.name, nbformat.writes(executed))
    print(f"\n{scoreboard.ladder_text()}")
    return seconds


def execute(notebook: Path, page: Path | None, core: bool = False) -> nbformat.NotebookNode:
    """Execute one notebook with a progress bar over its cells, write it to `page`, if given, and return the result.

    With `core` the part after the core is neither executed nor written. The kernel's output to the terminal goes into a
    file beside the page, with the ending ``log``. TensorBoard ends with the kernel, so a note replaces it where the
    notebook embeds it. Raises `NotebookFailed` if a cell raises an error or its kernel dies; the page is written all
    the same, up to that cell. Without a page, what the kernel prints to the terminal is dropped.
    """
    content = nbformat.read(notebook, as_version=4)
    if core:
        content.cells = content.cells[: core_cells(content)]
    if page:
        page.parent.mkdir(parents=True, exist_ok=True)
    cells, executed = sum(cell.cell_type == "code" for cell in content.cells), 0

    def count(**_: object) -> None:
        nonlocal executed
        executed += 1
        bar.update()

    bar = terminal.bar(notebook.stem, "cell", cells)
    with bar, open(page.with_suffix(".log") if page else os.devnull, "w", encoding="utf-8") as log:
        client = NotebookClient(
            content,
            kernel_manager_class=ThisInterpreter,
            kernel_name="python3",
            startup_timeout=1200,  # s: thirty readers may start at once
            timeout=None,
            coalesce_streams=True,
            resources={"metadata": {"path": str(notebook.parent)}},
            on_notebook_start=_leave_ctrl_c_alone,
            on_cell_executed=count,
        )
        try:
            with asyncio.Runner() as runner:
                runner.get_loop().set_exception_handler(_unless_the_kernel_was_ended)
                runner.run(client.async_execute(stdout=log, stderr=log, env=os.environ | {"COURSE_SLIDERS": "off"}))
        except CellExecutionError as error:
            raise NotebookFailed(f"{notebook}, cell {executed} of {cells}:\n{error}") from error
        except DeadKernelError as error:  # it raised nothing, so its cell is not counted as executed
            raise NotebookFailed(
                f"{notebook}, cell {executed + 1} of {cells}: the kernel died. Most often memory ran out: see "
                "`python -m helpers check`" + (f", and {log.name} for the kernel's last output." if page else ".")
            ) from error
        finally:
            _forget_tensorboard(content)
            if page:
                exporter = HTMLExporter(extra_loaders=[DictLoader({"offline.j2": OFFLINE})], template_file="offline.j2")
                html, _ = exporter.from_notebook_node(content, {"metadata": {"name": page.stem}})
                staging.write(page, html)
    return content


def core_cells(notebook: nbformat.NotebookNode) -> int:
    """Return how many cells the core of a notebook has: those before `FURTHER`."""
    further = (place for place, cell in enumerate(notebook.cells) if cell.source.startswith(FURTHER))
    return next(further, len(notebook.cells))


def all_notebooks() -> list[Path]:
    """Return the notebooks of the course, in order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]-*.ipynb"))


def pages() -> Path:
    """Folder where `run` writes pages and keeps executed notebooks, absolute; it need not exist yet."""
    return config.runs_dir() / "html"


def _unless_the_kernel_was_ended(loop: asyncio.AbstractEventLoop, context: dict) -> None:
    """Report what went wrong while the loop ended, except that Ctrl-C has ended the kernel."""
    if not isinstance(context.get("exception"), DeadKernelError):
        loop.default_exception_handler(context)


async def _leave_ctrl_c_alone(**_) -> None:
    """Remove nbclient's handler of Ctrl-C, which ends the kernel, goes on, and reports a dead kernel."""
    with suppress(NotImplementedError):  # Windows, where there is none
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def _forget_tensorboard(notebook: nbformat.NotebookNode) -> None:
    note = "TensorBoard opens here when you run the notebook."
    data = {"text/plain": note, "text/html": f"<p><i>{note}</i></p>"}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "<iframe" in output.get("data", {}).get("text/html", ""):
                output.data = nbformat.from_dict(data)


# ---------------------------------------------------------------------------------------------------------------------
# How long it will take


def record_times(seconds: dict[str, float], data: str) -> None:
    """Store the notebooks' run times, and what they were measured on, for `times_text` on other machines."""
    times = _recorded()
    times[config.preset().name] = {
        "seconds": seconds,
        "machine": f"{wording.counted(machine.cores(), 'core')}, {hardware.describe()['device']}",
        "data": data,
        "date": datetime.date.today().isoformat(),
    }
    staging.write(RUN_TIMES, json.dumps(times, indent=2) + "\n")


def times_text() -> str:
    """Return in words how many minutes all notebooks take, as recorded."""
    return "; ".join(
        f"{preset} {sum(recorded['seconds'].values()) / 60:.0f} min, recorded on {recorded['machine']}"
        for preset, recorded in _recorded().items()
    )


def _recorded() -> dict[str, dict]:
    return json.loads(RUN_TIMES.read_text(encoding="utf-8")) if RUN_TIMES.exists() else {}
