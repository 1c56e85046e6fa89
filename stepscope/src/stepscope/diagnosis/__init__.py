"""Says where the bottleneck of a training loop is, and what to change: for a running loop, or for a trace of one.

`diagnose` runs a loop: it looks at the loader, times some steps with the stopwatch and records some with the profiler.
`of_trace` reads a recorded trace, `of_ranks` the traces of all processes that trained together. ``stepscope diagnose
PATH`` prints both for a folder.

The verdict is that of the finding with the largest gain. A gain is at most the share of the step that the finding takes
(Amdahl's law): for a step of K ms and a share s it is s · K ms, or 1 / (1 − s) times the speed.

Each finding names a topic, such as "mixed precision". `Diagnosis.linked` adds links to pages about the topics.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from stepscope import traces
from stepscope.diagnosis import device, loading, profile, result, step
from stepscope.diagnosis.job import of_ranks
from stepscope.diagnosis.result import Diagnosis, Finding, conclude
from stepscope.traces import report

__all__ = ["Diagnosis", "Finding", "diagnose", "each", "of_ranks", "of_trace", "show"]

NEEDS_THE_LOADER = (
    "why loading is slow. The trace does not contain the workers, the sizes of files, or the times of decoding. "
    "In a notebook or script, stepscope.diagnosis.diagnose(loader, step) looks at them."
)


def diagnose(loader: Iterable, step: Callable, *, steps: int = 20, folder: str | Path = "diagnosis") -> Diagnosis:
    """Find the bottleneck of a training loop.

    The loop runs unchanged: first with the stopwatch, then with the profiler, then while a second thread notes each
    millisecond which line runs. So `step` is called some dozens of times, and trains. Some items of the dataset are
    loaded in this process, to time them. If a setting is known to slow steps, more steps run with the other setting. If
    a batch has fewer than eight items, more run with one that repeats it eight times, and may fail half-way: give
    `step` a model to throw away. All workers started here have ended on return.

    The profiler's trace stays in `folder`, where it replaces the trace of the previous diagnosis.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or another iterable that can be iterated over again; from the latter no items are loaded.
    step : callable
        One training step. It is called as ``step(*batch)`` if the batch is a tuple or a list, such as images and
        labels, otherwise, as with a dict, as ``step(batch)``; see `timing.call`.
    steps : int
        Steps to time; 1 or more.
    folder : str or Path
        Where the profile goes: by default ``diagnosis`` in the current folder.

    Raises
    ------
    Exception
        What the loader or the step raises; from a worker, with the worker's traceback.
    timing.WorkerDied
        If a worker is killed or exits.
    ValueError
        If the loader yields no batches, or none when it is started again; or if there is no step to time.
    RuntimeError
        If a profiler is active already.
    FileExistsError
        If `folder` holds files that are not of a recording.

    Examples
    --------
    >>> diagnosis.diagnose(loader, lambda images, labels: train(images, labels))  # doctest: +SKIP
    """
    from stepscope.diagnosis import run  # here, since torch takes seconds, and the shell does not need it

    return run.diagnose(loader, step, steps, Path(folder))


def of_trace(path: str | Path | traces.Trace) -> Diagnosis:
    """Find the bottleneck of the training loop that a trace, of PyTorch 1.12 or newer, was recorded from.

    `path` may be the folder of a run. Raises TraceError if there is no trace, if it cannot be read, or if it holds
    several processes or recordings.
    """
    try:
        recorded = profile.read(traces.load(path))
    except traces.NoSteps as error:
        return conclude(float("nan"), (), (), doubt=str(error))
    evidence = profile.evidence(recorded)
    if doubt := profile.doubt(recorded):
        return conclude(recorded.step_ms, evidence, (), doubt=doubt, steps=recorded.timed)
    findings = [
        *device.findings(recorded),
        *result.findings(step.RULES, step.read(recorded)),
        *result.findings(loading.RULES, loading.of_profile(recorded)),
    ]
    unknown = [NEEDS_THE_LOADER] if any(finding.verdict == "loading" for finding in findings) else []
    otherwise = profile.unexplained(recorded)
    return conclude(recorded.step_ms, evidence, findings, unknown, otherwise=otherwise, steps=recorded.timed)


def show(path: str | Path) -> bool:
    """Print the diagnosis of each trace at `path`, of all ranks in a folder together, and what cannot be read.

    Parameters
    ----------
    path : str or Path
        A trace file, the folder of a run, or a folder of such folders. Processes that trained together are diagnosed
        one by one, and then together.

    It returns whether all of them could be read, and raises NoTraces if there are none.
    """
    return report.show(path, lambda trace: str(_of_any(trace)))


def each(path: str | Path) -> Iterator[dict]:
    """Yield for each trace at `path` what `show` prints, as `stepscope.results.document` takes it.

    Each process of a job is one result, and all processes together are another. It raises what `show` raises.
    """
    for title, found in report.each(path, _of_any):
        if isinstance(found, Diagnosis):
            yield {"trace": title, "diagnosis": found.as_json()}
        else:
            yield {"trace": title, "problem": str(found)}


def _of_any(trace: traces.Trace | traces.Ranks) -> Diagnosis:
    return of_trace(trace) if isinstance(trace, traces.Trace) else of_ranks(trace)
