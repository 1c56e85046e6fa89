"""A plugin for nbval: a cell that prints nothing for a while is no failure; a notebook that leaves settings behind is.

The check is appended to the notebook's last cell, and what it is held against to the first one that imports torch.
After the last cell, quick cells are executed once more, from the last to the first: a reader may go back to each.
"""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

AGAIN, QUICK = " again", 0.5  # seconds
BEFORE = "\nfrom support import nbval_plugin as _plugin\n_before = _plugin.settings()\n"
AFTER = "\nassert _plugin.settings() == _before, (_plugin.settings(), _before)\n"


def settings() -> dict[str, object]:
    """Return the settings of this process that change how fast it is, or what it computes.

    Without TF32: notebooks 09 to 12 set it on purpose, for all that follows. The first start method is the default.
    """
    import torch

    return {
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "oneDNN": torch.backends.mkldnn.enabled,
        "start method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "folder": Path.cwd(),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(("COURSE_", "OMP_", "MKL_"))
        },
    }


def pytest_collection_modifyitems(items):
    notebooks = {}
    for item in items:
        if hasattr(item, "output_timeout"):  # a cell
            notebooks.setdefault(item.parent, []).append(item)
    for all_ in notebooks.values():
        cells = [item.cell for item in all_]
        first = next((cell for cell in cells if "import torch\n" in cell.source and cell.source[:2] != "%%"), None)
        if first is not None:
            first.source += BEFORE
            cells[-1].source += AFTER
        items += [_again(item) for item in reversed(all_)]
    for item in items:
        item.output_timeout = 300  # nbval 0.11 has 5 s here, and no option for it


def _again(item):
    """Return the same cell as another test, which is skipped if the cell took long before."""
    again = type(item).from_parent(
        item.parent, name=item.name + AGAIN, cell_num=item.cell_num, cell=item.cell, options=item.options
    )
    run, run_again, seconds = item.runtest, again.runtest, []

    def first():
        begin = time.monotonic()
        run()
        seconds.append(time.monotonic() - begin)

    def second():
        if not seconds or seconds[0] > QUICK:
            pytest.skip("It took long before, or failed.")
        run_again()

    item.runtest, again.runtest = first, second
    return again
