"""A control that must fail does so whatever the seed, and the right variants hold as well."""

import os
import subprocess
import sys

import pytest
from support import seeds
from support.notebooks import NOTEBOOKS

from helpers import config

# `make prove` asks for ten
SEEDS = [config.SEED, *range(int(os.environ.get("TEST_SEEDS", "2")) - 1)]
WITH_A_CONTROL = [path for path in NOTEBOOKS if seeds.cells(path, seeds.EXPERIMENT)]


def test_the_notebooks_that_compare_losses_have_a_control():
    assert [path.stem[:2] for path in WITH_A_CONTROL] == ["04", "09", "10", "11"]


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", WITH_A_CONTROL, ids=lambda path: path.stem)
def test_the_control_fails_with_every_seed(path, any_images):
    command = [sys.executable, seeds.__file__, path, *map(str, SEEDS)]
    environment = any_images | {"PYTHONPATH": str(config.PROJECT), "MPLBACKEND": "agg"}
    done = subprocess.run(command, env=environment, cwd=path.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
