"""The file that ``stepscope run --json`` and ``stepscope diagnose --json`` write; `SCHEMA` describes it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.report.findings import Diagnosis

VERSION = 2  # of the file; programs for other versions must refuse it
SCHEMA = Path(__file__).with_name("results.schema.json")
WANTED = "Name a file that `stepscope run --json FILE` or `stepscope diagnose --json` wrote."


class ResultError(ValueError):
    """A file does not hold results, or not the requested ones. The message says which, and what to do."""


def document(command: str, results: Sequence[dict[str, Any]]) -> str:
    """Return what a command, ``"run"`` or ``"diagnose"``, found, as the text of such a file.

    `results` has for each process or trace a ``"diagnosis"``, from `Diagnosis.as_json`, or the ``"problem"`` why there
    is none.
    """
    return json.dumps({"version": VERSION, "command": command, "results": list(results)}, indent=1) + "\n"


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the results in such a file: each ``"diagnosis"`` as a `Diagnosis`, the ``"machine"`` as text.

    Raises `ResultError` if it is no such file, or has another version, and `OSError` if it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        if content["version"] != VERSION:
            raise ResultError(
                f"{path}: expected results of version {VERSION}, found {content['version']!r}. Write it again, or read "
                "it with the stepscope that wrote it."
            )
        return [_result(each) for each in content["results"]]
    except ResultError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__} {error}"
        raise ResultError(f"{path}: expected results as JSON, found none or damaged ones ({why}). {WANTED}") from error


def _result(content: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its parts as Python objects; raises ValueError, TypeError or LookupError if it is none."""
    if ("problem" in content) == ("diagnosis" in content):
        raise ValueError("a result has a problem or a diagnosis")
    result: dict[str, Any] = {name: str(content[name]) for name in ("problem", "trace") if name in content}
    if content.get("rank") is not None:
        result["rank"] = int(content["rank"])
    if "machine" in content:
        result["machine"] = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    if "diagnosis" in content:
        result["diagnosis"] = Diagnosis.of_json(content["diagnosis"])
    return result
