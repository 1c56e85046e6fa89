"""Runs the ladder of the notebooks without Jupyter, and writes a reference: results, a light trace a rung, a table.

``python -m helpers record --out DIR`` makes this folder:

==================== ====================================================================
``scoreboard.jsonl`` a result a rung, as in the notebooks' own scoreboard
``machine.json``     what they were measured on
``README.md``        both, to read
``ladder.png``       the results as a figure
``waiting.png``      where the time of a step goes, in the first rungs
``traces/``          a folder for each rung, with a trace of two steps
``timings.jsonl``    every timed run: an interrupted recording goes on where it was
==================== ====================================================================

It needs torch 2.11 or newer, torchvision, torchmetrics, pandas, orjson, google-crc32c, psutil, nvidia-ml-py, filelock
and tqdm; neither Jupyter nor TensorBoard nor the libraries of the packed formats; Matplotlib for the figures only.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import pynvml
import torch

from helpers import config, staging, timing, training
from helpers.results import scoreboard
from helpers.timing import profiling

_TRACED_STEPS = 2
_TIMINGS, _MACHINE, _RESULTS = "timings.jsonl", "machine.json", "scoreboard.jsonl"
_CHANGES = {"date", "clocks"}  # of the machine, without making it another one


class OtherRecording(ValueError):
    """The folder holds a recording of another machine, or with other settings."""


@dataclass(frozen=True)
class Rung:
    """What is timed under one name.

    Attributes
    ----------
    name : str
        As in the notebook's scoreboard, such as ``"03 more workers"``.
    loader : iterable
    step : callable
    baseline : str or None
        The rung of the same group that it is compared with; None for the first of its kind.
    """

    name: str
    loader: Iterable
    step: timing.Step
    baseline: str | None = None


@dataclass(frozen=True)
class Group:
    """Rungs that are timed interleaved.

    Attributes
    ----------
    rungs : tuple of Rung
    data : str
        Source of the images.
    steps : int
        In one timed run.
    left_out : tuple of str
        What cannot be timed here, and why.
    kept : tuple
        What must not end before the group does, such as a server.
    """

    rungs: tuple[Rung, ...]
    data: str
    steps: int
    left_out: tuple[str, ...] = ()
    kept: tuple = ()


def record_reference(
    groups: Iterable[Callable[[], Group]], out: Path, draw: Callable[[pd.DataFrame, Path], None]
) -> list[str]:
    """Trace and time all rungs, and write the reference.

    Parameters
    ----------
    groups : iterable of callable
        Each prepares a group, and has its name.
    out : Path
        Folder to write. A recording of this machine that was interrupted there goes on.
    draw : callable
        Writes the results, a table like `scoreboard.ladder`, as a figure to the path that it is given.

    Returns
    -------
    list of str
        What was left out, and why: a package is missing, or the GPU's memory is too small.

    Raises
    ------
    OtherRecording
        If the folder holds the recording of another machine, or with other settings.
    """
    _begin_or_continue(out)
    results, left_out = [], []
    for prepare in groups:
        try:
            group = prepare()
        except ModuleNotFoundError as error:
            left_out.append(f"{prepare.__name__}: the package {error.name} is not installed")
            continue
        left_out += group.left_out
        fitting = []
        for rung in group.rungs:
            try:
                _trace(rung, out)
                fitting.append(rung)
            except training.OutOfMemory as error:
                torch.cuda.empty_cache()
                left_out.append(f"{rung.name}: {str(error).splitlines()[0]}")
        results += _results(fitting, group, out)
    staging.write(out / _RESULTS, scoreboard.lines(results))
    try:
        draw(scoreboard.ladder(out / _RESULTS), out / "ladder.png")
    except ModuleNotFoundError as error:  # Matplotlib, which a machine that only records may lack
        left_out.append(f"the figure: the package {error.name} is not installed")
    staging.write(out / "README.md", _page(out, results, left_out))
    return left_out


def _trace(rung: Rung, out: Path) -> None:
    """Record the trace of a rung, unless it is there already."""
    folder = (out / scoreboard.trace_folder(rung.name)).absolute()
    if folder.exists():
        return
    with staging.scratch(folder) as scratch:
        recorded = profiling.record(rung.loader, rung.step, str(scratch / "run"), active=_TRACED_STEPS, slim=True)
        (trace,) = recorded.glob("*.pt.trace.json.gz")
        trace.rename(recorded / "reference.pt.trace.json.gz")  # it was named after the machine
        recorded.rename(folder)


def _results(rungs: list[Rung], group: Group, out: Path) -> list[scoreboard.Result]:
    """Time rungs interleaved, but for the runs that are stored already."""

    def timer(rung: Rung) -> Callable[[], timing.Timing]:
        stored = _stored(rung, out)

        def run() -> timing.Timing:
            timed = next(stored, None)
            if timed is None:
                timed = timing.loop(rung.loader, rung.step, group.steps)
                _store(rung, timed, out)
            return timed

        return run

    comparison = timing.interleaved({rung.name: timer(rung) for rung in rungs}, config.preset().rounds)
    return [
        scoreboard.result(
            rung.name,
            comparison,
            rung.name,
            baseline=rung.baseline if rung.baseline in comparison.names else None,
            loader=rung.loader,
            step=rung.step,
            data=group.data,
            trace=out / scoreboard.trace_folder(rung.name),
        )
        for rung in rungs
    ]


def _stored(rung: Rung, out: Path) -> Iterator[timing.Timing]:
    runs = [run for run in _runs(out) if run["rung"] == rung.name and run["workers"] == _workers(rung)]
    return iter([timing.Timing(**run["timing"]) for run in runs])


def _store(rung: Rung, timed: timing.Timing, out: Path) -> None:
    with open(out / _TIMINGS, "a") as file:
        file.write(json.dumps({"rung": rung.name, "workers": _workers(rung), "timing": asdict(timed)}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _runs(out: Path) -> list[dict]:
    """Return the stored runs, without one in the middle of whose writing we were interrupted."""
    path = out / _TIMINGS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _workers(rung: Rung) -> int:
    return getattr(rung.loader, "num_workers", 0)


def _begin_or_continue(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    staging.write(out / _TIMINGS, "".join(json.dumps(run) + "\n" for run in _runs(out)))
    path, now = out / _MACHINE, machine()
    if not path.exists():
        staging.write(path, json.dumps(now, indent=2) + "\n")
        return
    before = json.loads(path.read_text())
    other = [key for key in before.keys() | now.keys() if key not in _CHANGES and before.get(key) != now.get(key)]
    if other:
        found = ", ".join(f"{key} {before.get(key)!r} instead of {now.get(key)!r}" for key in sorted(other))
        raise OtherRecording(f"{out} holds another recording, with {found}. Name another folder, or delete this one.")


def machine() -> dict[str, object]:
    """Return what a recording is made on, and with."""
    properties = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return {
        "device": torch.cuda.get_device_name() if properties else "CPU",
        "device memory": f"{properties.total_memory / 1e9:.0f} GB" if properties else None,
        "driver": _driver(),
        "clocks": _clocks() if properties else None,
        "processor": _processor(),
        "cores": config.cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),
        "CUDA": torch.version.cuda if properties else None,
        "cuDNN": torch.backends.cudnn.version() if properties else None,
        "preset": config.preset().name,
        "rounds": config.preset().rounds,
        "date": datetime.date.today().isoformat(),
    }


def _driver() -> str | None:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None  # there is none


def _clocks() -> dict[str, int] | None:
    """MHz of the first GPU, now and at most; None if its driver does not say."""
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        kinds = {"multiprocessors": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
        now = {kind: pynvml.nvmlDeviceGetClockInfo(gpu, clock) for kind, clock in kinds.items()}
        most = {f"{kind}, at most": pynvml.nvmlDeviceGetMaxClockInfo(gpu, clock) for kind, clock in kinds.items()}
        return now | most
    except pynvml.NVMLError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # on other systems than Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _page(out: Path, results: list[scoreboard.Result], left_out: list[str]) -> str:
    """Return the reference as a page of Markdown."""
    machine = json.loads((out / _MACHINE).read_text())
    lines = [f"# Recorded on {machine['device']}", ""]
    lines += [
        "| rung | images/s (95% interval) | ms a step | host waits | device idle | ratio (95% interval) | trace |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [_row(result, out) for result in results]
    if results:
        lines += [
            "",
            f"Geometric means of {results[0].rounds} interleaved rounds of one process, and their 95% confidence "
            "intervals. Another process, or another hour, can move a ratio by more: see `tests/bench`.",
        ]
    if left_out:
        lines += ["", *(f"Left out: {each}." for each in left_out)]
    lines += ["", "| measured on | |", "|---|---|"]
    machine["clocks"] = ", ".join(f"{kind} {mhz:,} MHz" for kind, mhz in (machine["clocks"] or {}).items()) or None
    lines += [f"| {key} | {value} |" for key, value in machine.items() if value is not None]
    groups = dict.fromkeys((result.step, result.data) for result in results)
    lines += ["", "What a step is, and what it is fed:", "", *(f"- {step}; {data}" for step, data in groups)]
    lines += ["", "How each rung was timed, loader and step:", ""]
    lines += [f"- {result.rung}: {result.setting}" for result in results]
    return "\n".join(lines) + "\n"


def _row(result: scoreboard.Result, out: Path) -> str:
    rate = f"{result.images_per_second:,.0f} ({result.lowest:,.0f} to {result.highest:,.0f})"
    times = f"{result.step_ms:.2f} | {result.loading_share:.1%} | {scoreboard.percent_or_dash(result.device_idle)}"
    size = profiling.size_kb(out / scoreboard.trace_folder(result.rung))
    return f"| {result.rung} | {rate} | {times} | {scoreboard.ratio_text(result) or '–'} | {size:.0f} kB |"
