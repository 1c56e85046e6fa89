"""Run a notebook's experiment with a control that must fail, with several seeds: ``python seeds.py NOTEBOOK SEED…``."""

import sys
from pathlib import Path

import nbformat

from helpers import config

SETUP, EXPERIMENT = "experiment-setup", "experiment"  # tags: cells run once; cells run with each seed


def cells(notebook: Path, tag: str) -> list[str]:
    """Return the source of the code cells with this tag."""
    found = nbformat.read(notebook, 4).cells
    return [cell.source for cell in found if cell.cell_type == "code" and tag in cell.metadata.get("tags", [])]


def run(notebook: Path, seeds: list[int]) -> None:
    """Execute the setup once and the experiment with each seed; its assertions say whether the control failed."""
    names = {"__name__": "__main__", "display": lambda *_: None}
    for tag, each in ((SETUP, [config.SEED]), (EXPERIMENT, seeds)):
        for seed in each:
            config.SEED = seed
            for source in cells(notebook, tag):
                exec(compile(source, f"{notebook.name}, {tag}, seed {seed}", "exec"), names)


if __name__ == "__main__":
    run(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])
