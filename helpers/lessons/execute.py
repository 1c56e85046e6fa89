"""Executes the notebooks in order, without a browser; keeps each with its outputs, and writes it as an HTML page."""

from __future__ import annotations

import asyncio
import copy
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from tqdm import tqdm

from helpers import config, staging
from helpers.lessons import preflight
from helpers.results import recording, scoreboard

NOTEBOOKS = config.PROJECT / "notebooks"

# The page must open without internet: nothing of it comes from elsewhere.
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


@dataclass(frozen=True)
class Took:
    """How long a notebook took.

    Attributes
    ----------
    seconds : float
    working : float
        Share of them in which a processor worked for it, 0 to 1; without the time in which all waited.
    """

    seconds: float
    working: float


def run(notebooks: Sequence[Path] | None = None, images: str | None = None) -> dict[str, Took]:
    """Execute notebooks in order, each in a kernel of its own, and print the ladder.

    Each is written as an HTML page into ``html`` below ``COURSE_RUNS``, also one that fails; beside the page of one
    that does not fail, the notebook is kept with its outputs, and with what they were measured on, for the site. How
    long it took is kept below ``COURSE_RUNS`` for the estimate of `preflight`.

    Parameters
    ----------
    notebooks : sequence of Path, optional
        By default all of the course.
    images : str, optional
        Where the images come from, as `cifar10.Prepared` says it, to be kept with the outputs.

    Returns
    -------
    dict of str to Took
        By the notebook's name.

    Raises
    ------
    NotebookFailed
        If a cell raises an error or its kernel dies: no later notebook is executed then.
    """
    notebooks = all_notebooks() if notebooks is None else notebooks
    folder = pages()
    print(f"Preset {config.preset().name}: {len(notebooks)} notebooks. Pages go to {folder}.", flush=True)
    took = {}
    for notebook in notebooks:
        start, worked = time.perf_counter(), _cpu_seconds()
        executed = execute(notebook, folder / f"{notebook.stem}.html")
        seconds = time.perf_counter() - start
        executed.metadata["course"] = _provenance(images)
        staging.write(folder / notebook.name, nbformat.writes(executed))
        # Several threads at once count as one: what they do takes as long as the longest of them
        took[notebook.stem] = Took(round(seconds, 1), round(min((_cpu_seconds() - worked) / seconds, 1), 2))
        _keep(took)
    print(f"\n{scoreboard.ladder_text()}")
    return took


def execute(notebook: Path, page: Path) -> nbformat.NotebookNode:
    """Execute one notebook, write it to `page`, with a progress bar over its cells, and return it with its outputs.

    What its kernel writes to the terminal goes into a file beside the page, with the ending ``log``.

    Raises
    ------
    NotebookFailed
        If a cell raises an error or its kernel dies; the page is written all the same, up to that cell.
    """
    content = nbformat.read(notebook, as_version=4)
    page.parent.mkdir(parents=True, exist_ok=True)
    cells = sum(cell.cell_type == "code" for cell in content.cells)
    bar = tqdm(total=cells, desc=notebook.stem, unit="cell", file=sys.stdout)
    with bar, open(page.with_suffix(".log"), "w") as log:
        client = NotebookClient(
            content,
            kernel_manager_class=ThisInterpreter,
            kernel_name="python3",
            timeout=None,
            coalesce_streams=True,
            resources={"metadata": {"path": str(notebook.parent)}},
            on_notebook_start=_leave_ctrl_c_alone,
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            asyncio.run(client.async_execute(stdout=log, stderr=log))
        except CellExecutionError as error:
            raise NotebookFailed(f"{notebook}, cell {bar.n} of {cells}:\n{error}") from error
        except DeadKernelError as error:  # it raised nothing, so its cell is not counted as executed
            raise NotebookFailed(
                f"{notebook}, cell {bar.n + 1} of {cells}: the kernel died. Most often memory ran out: see "
                f"`python -m helpers check`, and {log.name} for the kernel's last words."
            ) from error
        finally:
            _write_page(content, page)
    return content


def all_notebooks() -> list[Path]:
    """Return the notebooks of the course, in order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]-*.ipynb"))


def pages() -> Path:
    """Folder where `run` writes pages and keeps executed notebooks, absolute; it need not exist yet."""
    return config.runs_dir() / "html"


def record_times(took: dict[str, Took], data: str) -> None:
    """Store how long the notebooks took, and this machine's calibration, for the estimate of `preflight` elsewhere."""
    path = preflight.RUN_TIMES
    times = json.loads(path.read_text()) if path.exists() else {}
    times[config.preset().name] = {
        "seconds": {name: each.seconds for name, each in took.items()},
        "working": {name: each.working for name, each in took.items()},
        "calibration": preflight.calibrate(),
        "machine": config.describe(),
        "data": data,
        "date": datetime.date.today().isoformat(),
    }
    staging.write(path, json.dumps(times, indent=2) + "\n")


def _provenance(images: str | None) -> dict[str, str | None]:
    """What the outputs of a notebook were measured on, and when."""
    return {
        "machine": config.describe(),
        "processor": recording.machine()["processor"],
        "preset": config.preset().name,
        "images": images,
        "date": datetime.date.today().isoformat(),
    }


def _cpu_seconds() -> float:
    """CPU time of the kernels that have ended, with the processes that they waited for; 0 on Windows."""
    times = os.times()
    return times.children_user + times.children_system


def _keep(took: dict[str, Took]) -> None:
    path = preflight.own_times()
    times = json.loads(path.read_text()) if path.exists() else {}
    times.setdefault(config.preset().name, {}).update({name: each.seconds for name, each in took.items()})
    staging.write(path, json.dumps(times, indent=2) + "\n")


async def _leave_ctrl_c_alone(**_) -> None:
    """Undo that nbclient, at Ctrl-C, ends the kernel and goes on, to report a dead kernel."""
    with suppress(NotImplementedError):  # Windows, where it does not do so
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def _write_page(executed: nbformat.NotebookNode, page: Path) -> None:
    exporter = HTMLExporter(extra_loaders=[DictLoader({"offline.html.j2": OFFLINE})], template_file="offline.html.j2")
    notebook = copy.deepcopy(executed)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_without_tensorboard(output) for output in cell.outputs]
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": page.stem}})
    staging.write(page, body)


def _without_tensorboard(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """TensorBoard ends with the kernel: a page that embeds it would show an error."""
    if "<iframe" in output.get("data", {}).get("text/html", ""):
        note = "TensorBoard opens here when you run the notebook."
        return nbformat.v4.new_output("display_data", {"text/plain": note, "text/html": f"<p><i>{note}</i></p>"})
    return output
