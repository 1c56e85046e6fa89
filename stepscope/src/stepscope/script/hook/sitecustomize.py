"""Imported by Python as it starts, in a script that ``stepscope run`` diagnoses, to hook it.

A `sitecustomize` of the reader's or of the system's has the same name, and must still run.
"""

import sys
from pathlib import Path

_own = str(Path(__file__).parent)
_module = sys.modules.pop(__name__)
sys.path[:] = [folder for folder in sys.path if folder != _own]
try:
    import sitecustomize  # noqa: F401  the other one
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
sys.modules.setdefault(__name__, _module)

from stepscope.script import hooks  # noqa: E402

hooks.install()
