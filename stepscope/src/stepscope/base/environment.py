"""Refuses a Python environment in which stepscope cannot observe a script."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

PACKAGES = ("torch", "numpy", "pandas", "orjson", "psutil", "filelock")  # needed in each process of a script
OLDEST = (2, 4)  # version of torch with which the tests pass


class EnvironmentLacks(RuntimeError):
    """This Python environment lacks a package that stepscope needs, or has one that is too old."""


def refuse() -> None:
    """Raise EnvironmentLacks if stepscope cannot observe a script in this environment. No package is imported."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise EnvironmentLacks(
            f"{sys.prefix}: expected {', '.join(PACKAGES)} in this Python environment, found no {', '.join(missing)}. "
            "Install stepscope and PyTorch where the script runs."
        )
    with suppress(metadata.PackageNotFoundError):  # a build of PyTorch that was not installed as a package
        version = metadata.version("torch")
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and (int(found[1]), int(found[2])) < OLDEST:
            least = ".".join(map(str, OLDEST))
            raise EnvironmentLacks(f"{sys.prefix}: expected PyTorch {least} or later, found {version}. Upgrade it.")
