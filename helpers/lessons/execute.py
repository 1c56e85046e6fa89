"""Executes the notebooks in order, without a browser, and estimates how long that takes on this machine."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import nbformat
import numpy as np
import psutil
import torch
from jinja2 import DictLoader
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from PIL import Image
from tqdm import tqdm

from helpers import config, training
from helpers.data import synthetic
from helpers.results import hardware, scoreboard
from helpers.training import models
from stepscope import timing
from stepscope.base import machine, staging

NOTEBOOKS = config.PROJECT / "notebooks"
RUN_TIMES = config.PROJECT / "data" / "reference" / "run-times.json"
FIRST_COMPUTING = "08"  # earlier notebooks load, this and later ones compute
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

    With `core` only the core of each is executed. Its time is not kept, since the estimates are for whole notebooks.

    Each notebook, also one that fails, is written as an HTML page into ``html`` below ``COURSE_RUNS``. For the site, a
    notebook that does not fail is kept there, too, with its outputs and what they were measured on: `images` says
    where the images come from. The time of each notebook is kept for `estimate_text`.

    Raises
    ------
    NotebookFailed
        If a cell raises an error or its kernel dies: no later notebook is executed then.
    """
    notebooks = all_notebooks() if notebooks is None else notebooks
    folder = pages()
    what = "cores of notebooks" if core else "notebooks"
    print(f"Preset {config.preset().name}: {len(notebooks)} {what}. Pages go to {folder}.", flush=True)
    seconds = {}
    for notebook in notebooks:
        start = time.perf_counter()
        executed = execute(notebook, folder / f"{notebook.stem}.html", core)
        seconds[notebook.stem] = round(time.perf_counter() - start, 1)
        executed.metadata["course"] = {
            "machine": config.describe(),
            "processor": hardware.describe()["processor"],
            "preset": config.preset().name,
            "images": images,
            "date": datetime.date.today().isoformat(),
        }
        staging.write(folder / notebook.name, nbformat.writes(executed))
        if not core:
            own = _own()
            own.setdefault(config.preset().name, {}).update(seconds)
            staging.write(own_times(), json.dumps(own, indent=2) + "\n")
    print(f"\n{scoreboard.ladder_text()}")
    return seconds


def execute(notebook: Path, page: Path, core: bool = False) -> nbformat.NotebookNode:
    """Execute one notebook with a progress bar over its cells, write it to `page`, and return it with its outputs.

    With `core` the part after the core is neither executed nor written.
    The kernel's output to the terminal goes into a file beside the page, with the ending ``log``. TensorBoard ends
    with the kernel, so a note replaces it where the notebook embeds it.

    Raises
    ------
    NotebookFailed
        If a cell raises an error or its kernel dies; the page is written all the same, up to that cell.
    """
    content = nbformat.read(notebook, as_version=4)
    if core:
        content.cells = content.cells[: core_cells(content)]
    page.parent.mkdir(parents=True, exist_ok=True)
    cells = sum(cell.cell_type == "code" for cell in content.cells)
    bar = tqdm(total=cells, desc=notebook.stem, unit="cell", file=sys.stdout)
    with bar, open(page.with_suffix(".log"), "w") as log:
        client = NotebookClient(
            content,
            kernel_manager_class=ThisInterpreter,
            kernel_name="python3",
            startup_timeout=1200,  # s: thirty readers may start at once
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
                f"`python -m helpers check`, and {log.name} for the kernel's last output."
            ) from error
        finally:
            _forget_tensorboard(content)
            exporter = HTMLExporter(extra_loaders=[DictLoader({"offline.j2": OFFLINE})], template_file="offline.j2")
            staging.write(page, exporter.from_notebook_node(content, {"metadata": {"name": page.stem}})[0])
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


def own_times() -> Path:
    """The file with the notebooks' run times on this machine."""
    return config.runs_dir() / "run-times.json"


def record_times(seconds: dict[str, float], data: str) -> None:
    """Store the notebooks' run times and this machine's calibration, for estimates on other machines."""
    times = _read(RUN_TIMES)
    times[config.preset().name] = {
        "seconds": seconds,
        "calibration": {kind: min(each) for kind, each in calibrate().items()},
        "machine": config.describe(),
        "data": data,
        "date": datetime.date.today().isoformat(),
    }
    staging.write(RUN_TIMES, json.dumps(times, indent=2) + "\n")


def calibrate() -> dict[str, list[float]]:
    """Time two pieces of the course's work, three times each, in seconds: the speed of this machine.

    ``"loading"`` decodes 400 small PNGs, ``"compute"`` is a training step of ResNet-50 with 32 images.
    """
    files = []
    for image in synthetic.draw(50, config.SEED)[0]:
        Image.fromarray(image).save(buffer := io.BytesIO(), "png")
        files.append(buffer.getvalue())
    workload = training.resnet_workload(batch=32)
    model = models.resnet50(workload.side).to(config.device())
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batch = torch.zeros(workload.batch, 3, 32, 32, dtype=torch.uint8), torch.zeros(workload.batch, dtype=torch.long)

    def loading() -> None:
        for file in files * 8:
            np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), dtype=np.float32) / 255

    work = {"loading": loading, "compute": lambda: step(*batch)}
    times = {kind: timing.each_call_ms(function, repeats=3, longest=5.0) for kind, function in work.items()}
    return {kind: [ms / 1e3 for ms in each] for kind, each in times.items()}


def estimate_text() -> str:
    """Return in words how many minutes this machine needs to execute all notebooks, for each preset.

    A notebook that has run here counts with its time here. For the others, times recorded on another machine are
    scaled by the two machines' calibrations: of loading for notebooks 00 to 07, of compute from 08 on.
    The estimate is a range, since the times in `calibrate` vary.
    """
    here, recorded, own = calibrate(), _read(RUN_TIMES), _own()
    texts = []
    for preset in config.PRESETS:
        if preset not in recorded:
            texts.append(f"{preset} unknown")
            continue
        there, timed = recorded[preset], own.get(preset, {})
        minutes = []
        for end in (min, max):
            slower = {kind: end(here[kind]) / seconds for kind, seconds in there["calibration"].items()}
            seconds = {
                name: seconds * slower["loading" if name < FIRST_COMPUTING else "compute"]
                for name, seconds in there["seconds"].items()
            }
            minutes.append(f"{max(sum((seconds | timed).values()) / 60, 1):.0f}")
        text = f"{preset} about {minutes[0]}" if minutes[0] == minutes[1] else f"{preset} {' to '.join(minutes)}"
        texts.append(f"{text} min" + (f" ({len(timed)} of the notebooks timed here)" if timed else ""))
    busy = psutil.getloadavg()[0] > machine.cores()
    return ", ".join(texts) + busy * ". Other programs keep the cores busy now: check again when it is quiet"


def _own() -> dict[str, dict[str, float]]:
    """Return the seconds of `own_times`, by preset and notebook; raise `config.CourseError` if the file is damaged."""
    path = own_times()
    try:
        own = _read(path)
        if not all(math.isfinite(seconds) and seconds >= 0 for timed in own.values() for seconds in timed.values()):
            raise ValueError("impossible seconds")
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise config.CourseError(
            f"{path}: expected the notebooks' times in seconds, found something else ({error!r}). Delete it."
        ) from error
    return own


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
