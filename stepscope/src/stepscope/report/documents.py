"""The file that ``stepscope run --json`` and ``stepscope diagnose --json`` write; `SCHEMA` describes it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.base import staging
from stepscope.report.findings import Diagnosis

VERSION = 3  # of the file; programs for other versions must refuse the file
SCHEMA = Path(__file__).with_name("results.schema.json")
WANTED = "Name a file that `stepscope run --json FILE` or `stepscope diagnose --json` wrote."


class ResultError(ValueError):
    """A file contains no results, or not the requested results. The message says which, and how to proceed."""


def document(command: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the text of a file with the results of a command, ``"run"`` or ``"diagnose"``.

    Each process or trace has a result: a ``"diagnosis"`` from `Diagnosis.as_json`, or the ``"problem"`` that prevents a
    diagnosis.
    """
    return json.dumps({"version": VERSION, "command": command, "results": list(results)}, indent=1) + "\n"


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the results in a file: each ``"diagnosis"`` as a `Diagnosis`, the ``"machine"`` as text.

    If the facts hold the number of workers, a result has ``"workers"``.

    Raises `ResultError` if the file contains no results, or another version, and `OSError` if it cannot be read.
    """
    try:
        content = json.loads(staging.read(path))
        if content["version"] != VERSION:
            raise ResultError(
                f"{path}: expected results of version {VERSION}, found {content['version']!r}. Write the file "
                "again, or read it with the version of stepscope that wrote it."
            )
        return [_result(each) for each in content["results"]]
    except ResultError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__} {error}"
        raise ResultError(f"{path}: expected results as JSON, found other content ({why}). {WANTED}") from error


def _result(content: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its parts as Python objects; raises ValueError, TypeError or LookupError."""
    if ("problem" in content) == ("diagnosis" in content):
        raise ValueError("a result has a problem or a diagnosis")
    result: dict[str, Any] = {name: str(content[name]) for name in ("problem", "trace") if name in content}
    if content.get("rank") is not None:
        result["rank"] = int(content["rank"])
    if "machine" in content:
        result["machine"] = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    loop = content.get("facts", {}).get("loop") or {}
    if loop.get("workers") is not None:
        result["workers"] = int(loop["workers"])
    if "diagnosis" in content:
        result["diagnosis"] = Diagnosis.of_json(content["diagnosis"])
    return result
