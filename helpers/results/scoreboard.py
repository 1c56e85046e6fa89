"""One JSON line per result, with its provenance; the ladder so far."""

import datetime
import json
import math
import os
import typing
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from filelock import FileLock

from helpers import config
from stepscope import timing, traces
from stepscope.base import machine, staging
from stepscope.base.confidence import Interval
from stepscope.base.wording import digits

REFERENCE = config.PROJECT / "data" / "reference"
"""Results of named machines, a folder each."""

HERE = "your machine"

FOR_GPUS = ("09", "10", "11", "12")
"""Numbers of the rungs whose changes are made for a GPU: measured on a CPU, they say nothing about a GPU."""


@dataclass(frozen=True)
class Result:
    """One rung of the ladder, as measured by the stopwatch, and where the figures come from.

    The intervals are over the rounds of one process, or over the means of several.
    """

    rung: str  #: number and name, such as "01 naive PNG files"; rungs sort by it
    rate: Interval  #: throughput in images per second
    ratio: Interval | None  #: throughput over that of `baseline`; None for the first rung of its kind
    step_ms: float  #: time of a step in milliseconds: the mean, as in `timing.Comparison`
    loading_share: float  #: of that time, spent waiting for data, 0 to 1: the mean
    rounds: int  #: timed runs in a process
    steps: int  #: in each run
    workers: int  #: worker processes of the loader
    step: str  #: what a step is: the network and its device, or a simulated GPU
    data: str  #: source of the images
    device: str
    cores: int
    torch: str
    preset: str
    date: str
    baseline: str | None = None  #: the rung or variant in the same interleaved rounds, to which the ratio compares
    device_idle: float | None = None  #: share of the steps without a kernel, 0 to 1, by the trace; None without a GPU
    trace: str | None = None  #: folder of a trace of the same loader and step, below the folder of the runs
    processes: int = 1  #: that measured it
    baseline_loading_share: float | None = None  #: as `loading_share`, of the baseline in the same rounds
    code: str | None = None  #: of a recorded result: `measured.digest` of its notebook

    @property
    def for_another_device(self) -> bool:
        """Whether a change that is made for a GPU was measured without one."""
        return self.device == "CPU" and self.rung[:2] in FOR_GPUS and self.ratio is not None

    @property
    def images_a_step(self) -> int:
        """Images of a step: of all ranks together, and the mean if the last batch of an epoch is smaller."""
        return round(self.rate.mean * self.step_ms / 1e3)


def add(
    rung: str,
    comparison: timing.Comparison,
    variant: str,
    *,
    baseline: str | None = None,
    loader: Iterable,
    step: Callable | str,
    data: str,
    trace: Path | None = None,
    device: str | None = None,
) -> Result:
    """Store `variant` of a `comparison` as the latest result of its rung, and return it.

    Parameters
    ----------
    variant, baseline : str
        Two of the variants: the rung's, and the ratio's baseline; none for the first rung of its kind.
    loader : iterable
    step : callable or str
        What was timed as `variant`.
    data : str
        Source of the images, as `cifar10.prepare` names it.
    trace : Path, optional
        The folder of a run below ``COURSE_RUNS``, recorded with the same loader and step.
    device : str, optional
        What computed the step; by default the GPU, if there is one.
    """
    mean, runs = comparison.mean(variant), comparison.timings[variant]
    result = Result(
        rung=rung,
        rate=comparison.throughput(variant),
        ratio=comparison.ratio(variant, to=baseline) if baseline else None,
        step_ms=mean.step_ms,
        loading_share=mean.loading_share,
        rounds=len(runs),
        steps=max(len(run.durations) for run in runs),
        workers=getattr(loader, "num_workers", 0),
        step=str(getattr(step, "step", step)),  # of a recorded graph, the step that it replays
        data=data,
        device=device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"),
        cores=machine.cores(),
        torch=torch.__version__,
        preset=config.preset().name,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        baseline=baseline,
        device_idle=_device_idle(trace) if trace else None,
        trace=Path(os.path.relpath(trace, config.runs_dir())).as_posix() if trace else None,
        baseline_loading_share=comparison.mean(baseline).loading_share if baseline else None,
    )
    path = own_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        staging.write(path, text_of(path) + lines([result]), durable=True)
    return result


def _device_idle(trace: Path) -> float | None:
    """Return the share of the steps in which no device ran a kernel, None if that is unknown."""
    try:
        used = float(traces.accelerators(trace)["utilization"].max())
    except traces.NoAccelerator:
        return None
    return None if math.isnan(used) else 1 - used


def lines(results: Iterable[Result]) -> str:
    """Return results as the scoreboard stores them: a line of JSON each."""
    return "".join(json.dumps(asdict(result)) + "\n" for result in results)


def read(path: Path | None = None) -> list[Result]:
    """Return all stored results, oldest first, of this reader's scoreboard or of another one.

    Raises `config.CourseError` if a line cannot be read; the error names the file and the line.
    """
    path = path or own_path()
    return [parse(line, f"{path}, line {number}") for number, line in enumerate(text_of(path).splitlines(), 1)]


def text_of(path: Path) -> str:
    """Return the text of a scoreboard, empty if there is none; raise `config.CourseError` if it is another file."""
    try:
        return staging.read(path).decode() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise config.CourseError(f"{path}: expected a scoreboard, found another file: {error}. Move it away.") from None


def parse(line: str, place: str) -> Result:
    """Return the result that a line of a scoreboard holds; `place`, its file and number, is for the error.

    Raises `config.CourseError` if it holds something else, or a field has an impossible value.
    """
    try:
        stored = json.loads(line, parse_int=_whole)
        for name in ("rate", "ratio"):
            stored[name] = stored[name] and _interval(**stored[name])
        result = Result(**stored)
        for name, kind in typing.get_type_hints(Result).items():
            if not isinstance(getattr(result, name), kind | int if kind is float else kind):
                raise TypeError(f"{name} is {getattr(result, name)!r}")
        if (result.ratio is None) != (result.baseline is None):
            raise ValueError("a ratio and its baseline belong together")
        "".join(value for value in stored.values() if isinstance(value, str)).encode()  # half a character fails
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise config.CourseError(
            f"{place}: expected a result with the fields {', '.join(field.name for field in fields(Result))}, "
            f"found {line[:40]!r}, and: {error}. Delete the line."
        ) from error
    return result


def _whole(text: str) -> int:
    """Return the whole number that JSON has; ValueError if it is too large to compute with."""
    if math.isinf(float(text)):
        raise ValueError(f"{text[:20]}… is no number that can be measured")
    return int(text)


def _interval(**ends: typing.Any) -> Interval:
    interval = Interval(**ends)
    ordered = 0 <= interval.lowest <= interval.mean <= interval.highest
    if not (ordered and 0 < interval.mean < math.inf and isinstance(interval.count, int)):
        raise ValueError(f"{ends} is no interval of a figure above 0")
    return interval


def latest(rung: str) -> Result | None:
    """Return this reader's latest result of a rung whose name begins with `rung`, or None."""
    return next((result for result in reversed(read()) if result.rung.startswith(rung)), None)


def references(rung: str) -> list[tuple[str, Result]]:
    """Return the latest result of each rung whose name begins with `rung`, such as ``"09"``, with its machine's name.

    First those of this reader, whose machine is `HERE`, then those of ``data/reference``, GPUs first.
    """
    own = [(HERE, result) for result in ladder() if result.rung.startswith(rung)]
    return own + [(board.parent.name, result) for board, result in _recorded(rung)]


def _recorded(rung: str) -> list[tuple[Path, Result]]:
    """Return the results of a rung, or of all rungs of a notebook, with their scoreboards; GPUs first."""
    boards = sorted(REFERENCE.glob("*/scoreboard.jsonl"))
    results = [(board, result) for board in boards for result in ladder(board) if result.rung.startswith(rung)]
    return sorted(results, key=lambda pair: pair[1].device == "CPU")


def trace_folder(rung: str) -> Path:
    """Return where a recording keeps the trace of a rung, below its own folder."""
    return Path("traces", rung.replace(" ", "-"))


def borrow_traces(rung: str, folder: Path) -> dict[str, Path]:
    """If you have no GPU, copy the traces that GPUs recorded for a rung, such as ``"09"``, beside those in `folder`.

    TensorBoard then shows both. Prints a line for each, and returns its folder by the name of the machine.
    """
    borrowed: dict[str, Path] = {}
    if torch.cuda.is_available():
        return borrowed
    for board, result in dict(_recorded(rung)).items():  # the last rung of each machine
        if result.device == "CPU":
            continue
        for trace in (board.parent / trace_folder(result.rung)).glob("*.pt.trace.json.gz"):
            target = borrowed[board.parent.name] = folder / board.parent.name
            target.mkdir(parents=True, exist_ok=True)
            staging.write(target / trace.name, trace.read_bytes())
            print(f"The run {board.parent.name} beside yours was recorded on {result.device}.")
    return borrowed


def ladder(path: Path | None = None) -> list[Result]:
    """Return the latest result of each rung, in the order of the notebooks; `path` as in `read`."""
    latest_of = {result.rung: result for result in read(path)}
    return [latest_of[rung] for rung in sorted(latest_of, key=lambda rung: rung[:2])]


def ladder_text() -> str:
    """Return the ladder as lines of text, one per rung, and below them what it was measured on."""
    results = ladder()
    if not results:
        return f"No result yet in {own_path()}: run a notebook that measures, such as 01."
    width = max(len(result.rung) for result in results)
    text = [f"{'':{width}}  images/s  ms a step  host waits  device idle  ratio"]
    for result in results:
        rung = f"{result.rung:{width}}  {result.rate.mean:8,.0f}  {result.step_ms:9.1f}"
        shares = f"{result.loading_share:10.0%}  {percent_or_dash(result.device_idle):>11}"
        text.append(f"{rung}  {shares}  {ratio_text(result) or '–'}")
    return "\n".join([*text, "", *provenance(results)])


def percent_or_dash(share: float | None) -> str:
    """Return a share in percent, or a dash if it is unknown."""
    return "–" if share is None else f"{share:.0%}"


def ratio_text(result: Result) -> str:
    """Return the ratio of a result, its baseline, and the conclusion; empty without a ratio.

    For example ``"2.03× to 04 normalize on the device: faster (1.84 to 2.36 in 5 rounds)"``.
    """
    if result.ratio is None:
        return ""
    conclusion = timing.conclusion(result.ratio, of="round" if result.processes == 1 else "process")
    return f"{digits(result.ratio.mean)}× to {against(result)}: {conclusion}"


def against(result: Result) -> str:
    """Return a ratio's baseline in words: a rung, or in quotation marks a variant of the same notebook."""
    assert result.baseline is not None  # a ratio has one
    return result.baseline if result.baseline[:2].isdigit() else f"“{result.baseline}”"


def provenance(results: Iterable[Result]) -> list[str]:
    """Return what results were measured on, a line each, without repeats."""
    sources = (f"{result.device}, {result.step}, {result.data}, preset {result.preset}" for result in results)
    return list(dict.fromkeys(sources))


def own_path() -> Path:
    """Return where this reader's results are stored."""
    return config.runs_dir() / "scoreboard.jsonl"
