"""Installs the hooks: Python imports this module at the start of a script that ``stepscope run`` diagnoses.

The user or the system may have another `sitecustomize`, which must still run.
"""

import sys
from pathlib import Path

_own = str(Path(__file__).parent)
_module = sys.modules.pop(__name__)
sys.path[:] = [folder for folder in sys.path if folder != _own]
try:
    from stepscope.observe import hooks

    hooks.install()  # first, since the other sitecustomize may import PyTorch
except Exception:  # such as ImportError: a child of the script runs another Python, which has no stepscope
    pass
try:
    import sitecustomize  # noqa: F401  the other sitecustomize
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
sys.modules.setdefault(__name__, _module)
