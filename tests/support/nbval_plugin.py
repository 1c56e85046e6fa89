"""A plugin for nbval: a cell that prints nothing for a while is no failure; a notebook that leaves settings behind is.

The check is appended to the notebook's last cell, and what it is held against to the first one that imports torch.
"""

BEFORE = "\nfrom support import leaks as _leaks\n_before = _leaks.state()\n"
AFTER = "\nassert not _leaks.left_behind(_before), _leaks.left_behind(_before)\n"


def pytest_collection_modifyitems(items):
    notebooks = {}
    for item in items:
        if hasattr(item, "output_timeout"):  # a cell; nbval 0.11 has 5 s here, and no option for it
            item.output_timeout = 300
            notebooks.setdefault(item.parent, []).append(item.cell)
    for cells in notebooks.values():
        first = next((cell for cell in cells if "import torch\n" in cell.source and cell.source[:2] != "%%"), None)
        if first is not None:
            first.source += BEFORE
            cells[-1].source += AFTER
