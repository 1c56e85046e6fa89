"""The queue of runs: how long each takes, what it proves, and for which cards its results are committed."""

from dataclasses import dataclass
from pathlib import Path

from tests.gpu import results


@dataclass(frozen=True)
class Entry:
    """A run of the queue."""

    number: int
    minutes: float  #: about, on an H100 or H200
    proves: str
    measure: str = ""  #: module and function in this folder; empty if no plain script measures it
    instead: str = ""  #: how it is measured then
    processes: int = 1  #: that repeat it, so that an interval speaks of the machine and not of one process


QUEUE = (
    Entry(1, 1.5, "rungs 09 to 11, the calculated GPU: number formats and layouts", "resnet:formats"),
    Entry(2, 12, "stepscope's rules on a GPU: 31 loops with a fault, 6 healthy ones", "corpus:record"),
    Entry(3, 4, "both rungs of 12, and the seconds of compilation", "resnet:fewer_launches"),
    Entry(4, 1, "12 and 08: a launch-bound step; a launch before and after a profile", "resnet:small_step"),
    Entry(5, 4, "rungs 01 to 07 of the small network, and one CUDA graph", "ladder:small_network", processes=3),
    Entry(6, 1, "11: batch normalization in three number formats", "batch_norm:alone"),
    Entry(7, 5, "the calculated GPU, on a card that it has not seen", instead="runs 1 and 3 on another card"),
    Entry(8, 1, "08, 04, 03: .item(), copies, two streams", "host:waiting"),
    Entry(9, 1.5, "13: time, and the peak of the memory, with recomputed stages", "resnet:memory"),
    Entry(10, 1, "18: the grader on a GPU", "scripts:faults_alone"),
    Entry(11, 3, "18: seconds until the network is good enough", "scripts:until_good"),
    Entry(12, 1, "16: what DDP costs the host, strides; 12: attention", "one_rank:ddp_and_attention"),
    Entry(13, 10, "the committed reference", instead="python -m helpers record 09 10 11 12 --out data/reference/NAME"),
)


def listing(reference: Path) -> str:
    """Return the queue as text; `reference` has a folder for each machine, with committed results in ``gpu.jsonl``."""
    lines = results.of(line for path in sorted(reference.glob("*/gpu.jsonl")) for line in results.read(path))
    rows = ["run  minutes  committed for    proves"]
    for entry in QUEUE:
        cards = sorted(
            {line["card"].removeprefix("NVIDIA ") for line in results.of(lines, run=entry.number, small=False)}
        )
        how = f" ({entry.instead})" if entry.instead else ""
        rows.append(f"{entry.number:3}  {entry.minutes:7g}  {', '.join(cards) or '–':15}  {entry.proves}{how}")
    return "\n".join(rows)
