"""Records the trace of the guided tour in notebook 01: training steps, then evaluation, each with a costly metric.

``python -m helpers tour --out DIR`` makes a folder with the trace and a page that names the machine. The course comes
with ``data/reference/tour``. It belongs to no rung of the ladder: it times nothing.
"""

import itertools
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

from helpers import config
from helpers.results import hardware, scoreboard
from stepscope import traces
from stepscope.base import staging
from stepscope.timing import profiling
from stepscope.timing.stopwatch import warmup_steps

FOLDER = scoreboard.REFERENCE / "tour"
"""The course's own trace."""

TRACE, PAGE = "reference.pt.trace.json.gz", "README.md"
BATCH, CLASSES = 64, 10
TRAINING, EVALUATION = 3, 3  # recorded steps


def training_step(model, optimizer, images, labels, table) -> None:
    """Train on one batch. The names in quotation marks are in the trace; PyTorch itself names the optimizer's calls."""
    with record_function("training"):
        optimizer.zero_grad()
        with record_function("forward"):
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        with record_function("metric"):
            count_confusions(outputs.argmax(1), labels, table)


def evaluation_step(model, images, labels, table) -> None:
    """Evaluate one batch."""
    with record_function("evaluation"), torch.no_grad():
        with record_function("forward"):
            outputs = model(images)
        with record_function("metric"):
            count_confusions(outputs.argmax(1), labels, table)


def count_confusions(guesses, labels, table) -> None:
    """Add to ``table[i][j]`` how often class i was taken for class j, in the slowest way: one ``.item()`` for each."""
    for i, row in enumerate(table):
        for j in range(len(row)):
            row[j] += ((labels == i) & (guesses == j)).sum().item()


def record(out: str | Path) -> Path:
    """Profile the steps on this machine, write the trace and its page into the folder `out`, and return it.

    Raises `staging.TargetExists` if there is something at `out`.
    """
    out = Path(out)
    torch.manual_seed(config.SEED)
    device = config.device()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 8 * 8, CLASSES),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    dataset = TensorDataset(torch.rand(16 * BATCH, 3, 32, 32), torch.randint(CLASSES, (16 * BATCH,)))
    loader = DataLoader(dataset, BATCH, num_workers=1)
    table = [[0] * CLASSES for _ in range(CLASSES)]
    training = itertools.repeat(True, warmup_steps(loader) + 1 + TRAINING)  # with the profiler's warm-up

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images, labels = images.to(device), labels.to(device)
        if next(training, False):
            training_step(model, optimizer, images, labels, table)
        else:
            model.eval()
            evaluation_step(model, images, labels, table)

    with staging.folder(out) as staged:
        recorded = profiling.record(loader, step, staged / "steps", active=TRAINING + EVALUATION, record_shapes=True)
        (written,) = recorded.glob("*.pt.trace.json.gz")
        traces.slim(written, staged / TRACE)
        shutil.rmtree(recorded)  # the trace is named after the machine
        staging.write(staged / PAGE, _page(staged / TRACE))
    return out


def _page(trace: Path) -> str:
    """Return what was recorded, and on what, as a page of Markdown."""
    kept = ("device", "device memory", "driver", "processor", "cores", "system", "python", "torch", "CUDA", "date")
    machine = {key: value for key, value in hardware.describe().items() if key in kept and value is not None}
    machine["threads of PyTorch"] = torch.get_num_threads()
    lines = [
        "# The guided tour",
        "",
        f"The trace that notebook 01 goes through: {TRAINING} training steps, then {EVALUATION} evaluation steps, with",
        f"{BATCH} random images of 32 × 32 pixels in each. The network has two convolutions. In each step a confusion",
        "matrix is counted in a slow way, on purpose.",
        "",
        "It is no rung of the ladder, and no measurement: what the profiler costs is in each of its times.",
        "",
        "Recorded, and slimmed, by `python -m helpers tour --out DIR`, whose code is in `helpers/results/tour.py`.",
        "",
        "| recorded on | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in machine.items()),
        f"| size | {trace.stat().st_size / 1e3:.0f} kB |",
    ]
    return "\n".join(lines) + "\n"
