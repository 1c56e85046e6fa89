"""One JSON line a result, with its provenance; the ladder so far."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd
import torch
from filelock import FileLock

from helpers import config, staging, timing, traces
from helpers.confidence import Interval
from helpers.results.describing import describe
from helpers.timing.comparison import NOISY, limits, outcome
from helpers.wording import digits

REFERENCE = config.PROJECT / "data" / "reference"
"""Results of named machines, a folder each."""


class DamagedScoreboard(ValueError):
    """A line of the scoreboard is not a result."""


_KINDS = {"str": str, "int": int, "float": int | float, "str | None": str | None, "float | None": int | float | None}


@dataclass(frozen=True)
class Result:
    """One rung of the ladder, as measured by the stopwatch, and where the figures come from.

    Attributes
    ----------
    rung : str
        Number and name, such as ``"01 naive PNG files"``; rungs sort by it.
    images_per_second, step_ms, loading_share : float
        Throughput, time of a step in milliseconds, share of it spent waiting for data (0 to 1): means of the rounds,
        as in `timing.Comparison`.
    lowest, highest : float
        95% interval of the throughput.
    ratio, ratio_lowest, ratio_highest : float or None
        Throughput over that of `baseline`, and its 95% interval. None for the first rung of its kind.
    rounds, steps : int
        Timed runs, and steps in each.
    workers : int
        Worker processes of the loader.
    step : str
        What a step is: the network and its device, or a simulated accelerator.
    data : str
        Source of the images.
    device, cores, torch, preset, date
        Machine and circumstances.
    baseline : str or None
        The rung or variant that was timed interleaved with this one and that the ratio is against. None without a
        ratio, and in results that were stored before it was recorded: there it is unknown.
    setting : str or None
        Loader and step as `describing.describe` has them; None, unknown, in results that were stored before.
    device_idle : float or None
        Share of the steps in which no kernel ran on the device, 0 to 1, from a trace of the same loader and step: the
        host may wait for data while the device still computes. None where no trace shows it, as without a GPU.
    """

    rung: str
    images_per_second: float
    lowest: float
    highest: float
    ratio: float | None
    ratio_lowest: float | None
    ratio_highest: float | None
    step_ms: float
    loading_share: float
    rounds: int
    steps: int
    workers: int
    step: str
    data: str
    device: str
    cores: int
    torch: str
    preset: str
    date: str
    baseline: str | None = None
    setting: str | None = None
    device_idle: float | None = None

    @property
    def images_a_step(self) -> int:
        """Images of a step: of all ranks together, and the mean if the last batch of an epoch is smaller."""
        return round(self.images_per_second * self.step_ms / 1e3)


def result(
    rung: str,
    comparison: timing.Comparison,
    variant: str,
    *,
    baseline: str | None = None,
    loader: Iterable,
    step: Callable,
    data: str,
    trace: Path | None = None,
) -> Result:
    """Return `variant` of a `comparison` as a result of `rung`.

    Parameters
    ----------
    rung : str
    comparison : timing.Comparison
    variant : str
        Which of its variants.
    baseline : str, optional
        Which of its variants the ratio is against; none for the first rung of its kind.
    loader : iterable
    step : callable
        What was timed as `variant`: both are described in the result.
    data : str
        Source of the images, as `cifar10.prepare` names it.
    trace : Path, optional
        A trace file or the folder of a run, recorded of the same loader and step.
    """
    rate, mean, runs = comparison.throughput(variant), comparison.mean(variant), comparison.timings[variant]
    ratio = comparison.ratio(variant, to=baseline) if baseline else None
    return Result(
        rung=rung,
        images_per_second=rate.mean,
        lowest=rate.lowest,
        highest=rate.highest,
        ratio=ratio.mean if ratio else None,
        ratio_lowest=ratio.lowest if ratio else None,
        ratio_highest=ratio.highest if ratio else None,
        step_ms=mean.step_ms,
        loading_share=mean.loading_share,
        rounds=len(runs),
        steps=max(len(run.durations) for run in runs),
        workers=getattr(loader, "num_workers", 0),
        step=str(getattr(step, "step", step)),  # of a recorded graph, the step that it replays
        data=data,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        cores=config.cores(),
        torch=torch.__version__,
        preset=config.preset().name,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        baseline=baseline,
        setting=describe(loader, step),
        device_idle=_device_idle(trace) if trace else None,
    )


def _device_idle(trace: Path) -> float | None:
    """Return the share of the steps in which no device ran a kernel, None if that is unknown."""
    try:
        used = float(traces.accelerators(trace)["utilization"].max())
    except traces.NoAccelerator:
        return None
    return None if math.isnan(used) else 1 - used


def add(rung: str, comparison: timing.Comparison, variant: str, **provenance) -> Result:
    """Store a `result`, which takes the same arguments, as the latest of its rung, and return it."""
    added = result(rung, comparison, variant, **provenance)
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        staging.write(path, before + lines([added]), durable=True)
    return added


def lines(results: Iterable[Result]) -> str:
    """Return results as the scoreboard stores them: a line of JSON each."""
    return "".join(json.dumps(asdict(each)) + "\n" for each in results)


def read(path: Path | None = None) -> list[Result]:
    """Return all stored results, oldest first.

    Parameters
    ----------
    path : Path, optional
        Another scoreboard than this reader's own.

    Raises
    ------
    DamagedScoreboard
        If a line cannot be read; the error names the file and the line.
    """
    path = path or _path()
    try:
        stored = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [parse(line, f"{path}, line {number}") for number, line in enumerate(stored, 1)]


def parse(line: str, place: str) -> Result:
    """Return the result that a line of a scoreboard holds.

    Parameters
    ----------
    line : str
    place : str
        Its file and number, for the error.

    Raises
    ------
    DamagedScoreboard
        If it holds something else, or a field holds what cannot have been measured.
    """
    try:
        found = Result(**json.loads(line))
        for field in fields(Result):
            if not isinstance(getattr(found, field.name), _KINDS[field.type]):
                raise TypeError(f"{field.name} is {getattr(found, field.name)!r}")
        if not 0 < found.images_per_second < math.inf:
            raise ValueError(f"images_per_second is {found.images_per_second}")
        ends = found.ratio_lowest, found.ratio, found.ratio_highest
        if ends != (None, None, None) and (None in ends or not 0 <= ends[0] <= ends[1] <= ends[2] or not ends[1] > 0):
            raise ValueError(f"ratio_lowest, ratio and ratio_highest are {ends}")
    except (ValueError, TypeError) as error:
        raise DamagedScoreboard(
            f"{place}: expected a result with the fields {', '.join(field.name for field in fields(Result))}, "
            f"found {line[:40]!r}, and: {error}. Delete the line."
        ) from error
    return found


def latest(rung: str) -> Result | None:
    """Return the latest result of a rung whose name begins with `rung`, or None if there is none yet."""
    return _latest(read(), rung)


def references(rung: str) -> dict[str, Result]:
    """Return the latest result of a rung on this machine, and on each machine of ``data/reference`` that has one.

    If none has, that is printed.

    Parameters
    ----------
    rung : str
        How its name begins, such as ``"08"``.
    """
    boards = {"your machine": _path()} | {
        path.parent.name: path for path in sorted(REFERENCE.glob("*/scoreboard.jsonl"))
    }
    found = {name: _latest(read(path), rung) for name, path in boards.items()}
    found = {name: result for name, result in found.items() if result}
    if not found.keys() - {"your machine"}:
        print(f"No reference is recorded for rung {rung}: there is only your own machine to look at.")
    return found


def reference(rung: str) -> pd.DataFrame:
    """Return `references` as a table: a row a machine, in words."""
    rows = {
        name: {
            "images/s": f"{result.images_per_second:,.0f}",
            "ms a step": f"{result.step_ms:.1f}",
            "images a step": f"{result.images_a_step:,}",
            "host waits": f"{result.loading_share:.0%}",
            "device idle": percent_or_dash(result.device_idle),
            **_ratio_columns(result),
            "a step": result.step,
            "torch": result.torch,
        }
        for name, result in references(rung).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def _ratio_columns(result: Result) -> dict[str, str]:
    if pd.isna(result.ratio):
        return {"ratio": "–", "its 95% interval": "–", "to": "–"}
    if result.ratio_lowest == result.ratio_highest == 1:
        return {"ratio": "–", "its 95% interval": "–", "to": f"the same as {baseline_text(result)}"}
    ratio = Interval(result.ratio, result.ratio_lowest, result.ratio_highest, result.rounds)
    return {"ratio": f"{digits(ratio.mean)}×", "its 95% interval": limits(ratio), "to": baseline_text(result)}


def trace_folder(rung: str) -> Path:
    """Return where a recording keeps the trace of a rung, below its own folder."""
    return Path("traces", rung.replace(" ", "-"))


def borrow_traces(rung: str, run: str) -> dict[str, Path]:
    """Put the traces that GPUs recorded of a rung beside your own, if you have no GPU: TensorBoard shows both.

    Prints a line for each.

    Parameters
    ----------
    rung : str
        How its name begins, such as ``"08"``.
    run : str
        Folder below ``COURSE_RUNS`` with your own traces, such as ``"08-resnet50-baseline"``.

    Returns
    -------
    dict of str to Path
        The folder of each, by the name of the machine.
    """
    borrowed = {}
    if torch.cuda.is_available():
        return borrowed
    for board in sorted(REFERENCE.glob("*/scoreboard.jsonl")):
        result = _latest(read(board), rung)
        if result and result.device != "CPU":
            machine = board.parent
            (trace,) = (machine / trace_folder(result.rung)).glob("*.pt.trace.json.gz")
            target = config.runs_dir() / run / machine.name
            target.mkdir(parents=True, exist_ok=True)
            staging.write(target / trace.name, trace.read_bytes())
            borrowed[machine.name] = target
            print(f"The run {machine.name} beside yours was recorded on {result.device}.")
    return borrowed


def ladder(path: Path | None = None) -> pd.DataFrame:
    """Return the latest result of each rung, in order: one row each, the fields of `Result` as columns.

    Parameters
    ----------
    path : Path, optional
        The scoreboard of a recording instead of this reader's own. A recording is in order as it is; notebooks may have
        run in any order.
    """
    latest_of = {result.rung: result for result in read(path)}
    rows = [asdict(latest_of[rung]) for rung in (latest_of if path else sorted(latest_of))]
    return pd.DataFrame(rows, columns=[field.name for field in fields(Result)])


def ladder_text() -> str:
    """Return the ladder as lines of text, one a rung, with what it was measured on below."""
    table = ladder()
    if table.empty:
        return f"No result yet in {_path()}: run a notebook that measures, such as 01."
    width = max(map(len, table.rung))
    text = [f"{'':{width}}  images/s  ms a step  host waits  device idle  ratio"]
    for row in table.itertuples():
        rung = f"{row.rung:{width}}  {row.images_per_second:8,.0f}  {row.step_ms:9.1f}"
        shares = f"{row.loading_share:10.0%}  {percent_or_dash(row.device_idle):>11}"
        text.append(f"{rung}  {shares}  {ratio_text(row) or '–'}")
    return "\n".join([*text, "", *provenance(table)])


def percent_or_dash(share: float | None) -> str:
    """Return a share in percent, or a dash if it is unknown."""
    return "–" if pd.isna(share) else f"{share:.0%}"


def ratio_text(result: Result, short: bool = False) -> str:
    """Return the ratio of a result, what it is against, and what it shows; empty without a ratio.

    For example ``"2.03× to 04 normalize on the device: faster (1.84 to 2.36 in 5 rounds)"``, or if `short` only what
    stands before the colon, with a word of doubt if that was too noisy to say.
    """
    if pd.isna(result.ratio):
        return ""
    ratio = Interval(result.ratio, result.ratio_lowest, result.ratio_highest, result.rounds)
    if ratio.lowest == ratio.highest == 1:
        return f"the same as {baseline_text(result)}"
    against = f"{digits(ratio.mean)}× to {baseline_text(result)}"
    if short:
        return f"{against}, {NOISY}" if outcome(ratio) == NOISY else against
    return f"{against}: {timing.conclusion(ratio)}"


def baseline_text(result: Result) -> str:
    """Return what a ratio is against, in words: a rung, or in quotation marks a variant of the same notebook."""
    if pd.isna(result.baseline):
        return "an unknown baseline"
    return result.baseline if result.baseline[:2].isdigit() else f"“{result.baseline}”"


def provenance(table: pd.DataFrame) -> list[str]:
    """Say in a line each, without repeats, what the results in `table` were measured on."""
    sources = (
        f"{row.device}, {row.step}, {row.data}, preset {row.preset}"
        for row in table[["device", "step", "data", "preset"]].itertuples()
    )
    return list(dict.fromkeys(sources))


def _latest(results: list[Result], rung: str) -> Result | None:
    return next((result for result in reversed(results) if result.rung.startswith(rung)), None)


def _path() -> Path:
    return config.runs_dir() / "scoreboard.jsonl"
