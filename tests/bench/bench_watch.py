"""What it costs a script to be watched: ``python -m tests.bench.bench_watch``. Half a minute.

Steps of about 2 ms, which `stepscope.watch` times, and the same steps when it has nothing more to see, interleaved.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope import timing
from stepscope.script import hooks
from stepscope.script.watch import Watch

STEPS, ROUNDS, WIDTH = 500, 15, 512


def main() -> None:
    """Print how much longer a watched step takes."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = TensorDataset(torch.rand(64 * STEPS, WIDTH), torch.zeros(64 * STEPS, dtype=torch.long))
    loader = DataLoader(data, batch_size=None, sampler=torch.arange(len(data)).view(-1, 64))

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(10**9, Path(folder), print)  # it goes on timing
        hooks.install_here(watch)

        def timed(over: bool) -> timing.Timing:
            watch.over = over
            return timing.loop(loader, step, STEPS)

        result = timing.interleaved({"alone": lambda: timed(True), "watched": lambda: timed(False)}, ROUNDS)
        watch.over = True
    print(result.table().to_string())
    print(result.verdict("watched"))


if __name__ == "__main__":
    main()
