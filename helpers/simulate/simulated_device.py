"""A simulated GPU and the host that launches its work: two time lines, calculated from a few numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.simulate import simulated_trace
from stepscope.base.wording import counted

if TYPE_CHECKING:
    import pandas as pd

# Traces give the default stream the number 7, and others higher ones
HOST, COMPUTING, COPYING = "host", "stream 7", "stream 20"


@dataclass(frozen=True)
class SimulatedDevice:
    """A GPU with one stream or two, and the host that launches its work. Calculated: nothing runs.

    In each step the host gets a batch, launches its copy to the device, and then the kernels. A launch takes some time
    of the host, and then the host goes on. A stream runs its work in the order of the launches, each piece as soon as
    it was launched and the one before has ended. So the longer of the two time lines decides.

    Left out are the limit on launches that wait in a queue, the gap between two kernels of a stream, and the slowdown
    of a copy and kernels that use the memory at the same time.

    Parameters
    ----------
    kernels : int or sequence of (str, float)
        How many kernels a step has, each of `kernel_us`; or the name and the µs of each.
    kernel_us : float
        How long a kernel runs.
    launch_us : float
        How long the host takes for one launch: Python, PyTorch's operator and the driver together.
    copy_us : float
        How long the copy of a batch takes on the device; 0 for no copy.
    loading_us : float
        How long the host takes to get a batch.
    streams : int
        1: copies take their turn among the kernels. 2: they have a stream of their own, and the host launches the copy
        of the next batch before the kernels of this one; the kernels wait on the device until their batch is there.
    asks : bool
        At the end of each step the host asks for a value, as with ``loss.item()``, and waits until the kernels have
        run. (The copy of the value itself is left out.)
    graph : bool
        One launch starts all kernels of a step, as the replay of a CUDA graph does.
    how : str
        How the times were obtained: a word for every name in the trace.

    Examples
    --------
    >>> SimulatedDevice(kernels=10, kernel_us=100, launch_us=10).run(steps=10).step_us
    1001.0
    """

    kernels: int | Sequence[tuple[str, float]] = 8
    kernel_us: float = 40.0
    launch_us: float = 10.0
    copy_us: float = 0.0
    loading_us: float = 0.0
    streams: int = 1
    asks: bool = False
    graph: bool = False
    how: str = "simulated"

    def __post_init__(self):
        times = [self.kernel_us, self.launch_us, self.copy_us, self.loading_us, *(us for _, us in self.work)]
        if min(times) < 0 or not self.work or self.streams not in (1, 2):
            raise ValueError(f"Expected times of 0 µs or more, a kernel or more, and 1 or 2 streams, found {self}.")

    def __str__(self) -> str:
        lengths = {us for _, us in self.work}
        each = f" of {self.work[0][1]:g} µs" if len(lengths) == 1 else f", {sum(us for _, us in self.work):g} µs in all"
        parts = [
            counted(len(self.work), "kernel") + each,
            f"launched at once in {self.launch_us:g} µs" if self.graph else f"{self.launch_us:g} µs a launch",
            f"copy {self.copy_us:g} µs" if self.copy_us else "",
            f"loading {self.loading_us:g} µs" if self.loading_us else "",
            counted(self.streams, "stream"),
            "the host asks for the loss" if self.asks else "",
        ]
        return f"{self.how} GPU ({', '.join(filter(None, parts))})"

    @property
    def work(self) -> list[tuple[str, float]]:
        """The kernels of a step: names and µs."""
        if isinstance(self.kernels, int):
            return [(f"kernel {number}", self.kernel_us) for number in range(1, self.kernels + 1)]
        return list(self.kernels)

    def run(self, steps: int) -> SimulatedRun:
        """Calculate what host and device do in so many training steps, with an idle device at first."""
        lines, copied = _Lines(), {}
        ahead, copying = (1, COPYING) if self.streams == 2 else (0, COMPUTING)
        for step in range(steps):
            for batch in range(step + ahead if step else 0, min(step + ahead + 1, steps)):
                if self.loading_us:
                    lines.host_works("loading", "loading", self.loading_us, step)
                if self.copy_us:
                    copied[batch] = lines.launch(copying, "copy", [("batch", self.copy_us)], self.launch_us, step)
            for work in [self.work] if self.graph else [[kernel] for kernel in self.work]:
                lines.launch(COMPUTING, "kernel", work, self.launch_us, step, after=copied.get(step, 0.0))
            if self.asks:
                lines.host_works("wait", "wait", max(lines.ends[COMPUTING] - lines.ends[HOST], 0.0), step)
        import pandas as pd  # here: each rank of a job imports `simulate`, and needs no table

        columns = ["lane", "kind", "name", "start", "end", "step", "launch"]
        return SimulatedRun(self, steps, pd.DataFrame(lines.spans, columns=columns))


@dataclass(frozen=True)
class SimulatedRun:
    """What a `SimulatedDevice` and its host did, by calculation.

    Attributes
    ----------
    spans : DataFrame
        What happened on the two time lines: `lane`, "host", or "stream 7" and "stream 20" on the device; `kind`:
        "loading", "launch" or "wait" on the host, "kernel" or "copy" on the device; `name`; `start` and `end` in µs;
        `step`, from 0 on, in which the host launched it; `launch`, a number that a launch shares with what it
        launched, −1 where there is none.
    """

    device: SimulatedDevice
    steps: int
    spans: pd.DataFrame

    @property
    def end(self) -> float:
        """When both time lines end, in µs: the time of a stopwatch that waits for the device."""
        return float(self.spans["end"].max())

    @property
    def step_us(self) -> float:
        """Mean µs of a step, until the device has done the last one."""
        return self.end / self.steps

    @property
    def utilization(self) -> float:
        """Share of the time in which a kernel ran, 0 to 1."""
        kernels = self.spans[self.spans["kind"] == "kernel"]  # on one stream: no two at the same time
        return float((kernels["end"] - kernels["start"]).sum() / self.end)

    @property
    def ends(self) -> pd.DataFrame:
        """When the host went on from each step, and when the device had run its kernels: `host` and `device`, in ms."""
        ends = self.spans.pivot_table("end", "step", "lane", "max")[[HOST, COMPUTING]] / 1e3
        return ends.set_axis(["host", "device"], axis=1).assign(device=lambda table: table.max(axis=1))

    @property
    def ahead_us(self) -> float:
        """How far the host is ahead of the device when it goes on from the last step, in µs."""
        host, device = self.ends.iloc[-1]
        return float(device - host) * 1e3

    def write_trace(self, folder: str | Path) -> Path:
        """Write the time lines as a trace for TensorBoard's profiler tab; see `simulated_trace.write`."""
        return simulated_trace.write(self.spans, str(self.device), Path(folder), self.device.how)


class _Lines:
    """The spans of the time lines while they are calculated, and when each line ends."""

    def __init__(self):
        self.spans, self.ends, self.launches = [], defaultdict(float), 0

    def host_works(self, kind: str, name: str, us: float, step: int, launch: int = -1) -> None:
        start, self.ends[HOST] = self.ends[HOST], self.ends[HOST] + us
        self.spans.append((HOST, kind, name, start, self.ends[HOST], step, launch))

    def launch(
        self, stream: str, kind: str, work: Sequence[tuple[str, float]], us: float, step: int, after: float = 0.0
    ) -> float:
        """Let the host launch work on a stream, which begins no sooner than `after`; return when it will have run."""
        self.launches += 1
        self.host_works("launch", work[0][0] if len(work) == 1 else "graph", us, step, self.launches)
        for name, length in work:
            start = max(self.ends[HOST], self.ends[stream], after)
            self.ends[stream] = start + length
            self.spans.append((stream, kind, name, start, self.ends[stream], step, self.launches))
        return self.ends[stream]
