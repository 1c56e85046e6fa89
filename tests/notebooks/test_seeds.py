"""A control that must fail does so whatever the seed, and the right variants hold as well.

    python test_seeds.py NOTEBOOK SEED…

runs a notebook's experiment with these seeds: the cells with the tag ``experiment-setup`` once, those with the tag
``experiment`` with each. Their assertions say whether the control failed.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from helpers import config

SEEDS = [config.SEED, *range(int(os.environ.get("TEST_SEEDS", "2")) - 1)]  # `make prove` asks for ten


def cells(notebook, tag):
    found = nbformat.read(notebook, 4).cells
    return [cell.source for cell in found if cell.cell_type == "code" and tag in cell.metadata.get("tags", [])]


def run(notebook, seeds):
    names = {"__name__": "__main__", "display": lambda *_: None}
    for tag, each in (("experiment-setup", [config.SEED]), ("experiment", seeds)):
        for seed in each:
            config.SEED = seed
            for source in cells(notebook, tag):
                exec(compile(source, f"{notebook.name}, {tag}, seed {seed}", "exec"), names)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", ["04", "10", "11", "12"])
def test_the_control_fails_with_every_seed(number, any_images):
    (notebook,) = (config.PROJECT / "notebooks").glob(f"{number}-*.ipynb")
    assert cells(notebook, "experiment")
    environment = any_images | {"PYTHONPATH": str(config.PROJECT), "MPLBACKEND": "agg"}
    command = [sys.executable, __file__, notebook, *map(str, SEEDS)]
    done = subprocess.run(command, env=environment, cwd=notebook.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    run(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])
