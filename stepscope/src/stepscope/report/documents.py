"""The files that ``stepscope run --json``, ``diagnose --json`` and ``try --json`` write, and what is made of them.

`SCHEMA` describes the files of ``run`` and ``diagnose``; ``trying/tried.schema.json`` describes those of ``try``.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.base import staging
from stepscope.report.findings import Diagnosis

VERSION = 3  # of the file; programs for other versions must refuse the file
VERSIONS = {"run": VERSION, "diagnose": VERSION, "try": 1}
SCHEMA = Path(__file__).with_name("results.schema.json")
WANTED = "Name a file that stepscope wrote: `run --json FILE`, `try --json FILE`, or `diagnose --json`."


class ResultError(ValueError):
    """A file contains no results, or not the requested results. The message says which, and how to proceed."""


def document(command: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the text of a file with the results of a command, ``"run"`` or ``"diagnose"``.

    Each process or trace has a result: a ``"diagnosis"`` from `Diagnosis.as_json`, or the ``"problem"`` that prevents a
    diagnosis.
    """
    return json.dumps({"version": VERSION, "command": command, "results": list(results)}, indent=1) + "\n"


def load(path: str | Path) -> dict[str, Any]:
    """Return the content of a file of results, of any command; see `parse`.

    Raises `ResultError` if the file contains no results, or another version, and `OSError` if it cannot be read.
    """
    return parse(staging.read(path), path)


def parse(text: str | bytes, source: object) -> dict[str, Any]:
    """Return the content of a text with results; `source` names it in the `ResultError` for other texts.

    The ``"results"`` of ``run`` and ``diagnose`` are as `read` returns them. The results of ``try`` are plain values.
    """
    try:
        content = json.loads(text)
        if content["version"] != VERSIONS.get(content["command"]):
            raise ResultError(
                f"{source}: expected results of version {VERSIONS.get(content['command'])}, found "
                f"{content['version']!r}. Write the file again, or read it with the version of stepscope that wrote it."
            )
        if content["command"] == "try":
            return _trials(content)
        return {"command": str(content["command"]), "results": [_result(each) for each in content["results"]]}
    except ResultError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__} {error}"
        raise ResultError(f"{source}: expected results as JSON, found other content ({why}). {WANTED}") from error


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the results in a file: each ``"diagnosis"`` as a `Diagnosis`, the ``"machine"`` as text.

    If the facts hold the number of workers, a result has ``"workers"``.

    Raises `ResultError` if the file contains no diagnoses, or another version, and `OSError` if it cannot be read.
    """
    content = load(path)
    if content["command"] == "try":
        raise ResultError(f"{path}: expected diagnoses, found results of `stepscope try`. {WANTED}")
    return list(content["results"])


def _result(content: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its parts as Python objects; raises ValueError, TypeError or LookupError."""
    if ("problem" in content) == ("diagnosis" in content):
        raise ValueError("a result has a problem or a diagnosis")
    result: dict[str, Any] = {name: str(content[name]) for name in ("problem", "trace", "script") if name in content}
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


def title_of(result: dict[str, Any]) -> str:
    """Return the name of a result among several: its trace, or its rank."""
    if "trace" in result:
        return str(result["trace"])
    return f"Rank {result['rank']}" if "rank" in result else "All ranks together"


def ratio_text(ratio: tuple[float, float, float]) -> str:
    """Return a ratio with the ends of its interval as text."""
    mean, lowest, highest = ratio
    ends = f"{lowest:.2f} – {highest:.2f}" if math.isfinite(highest) else "interval unknown"
    return f"{mean:.2f}× ({ends})"


def _trials(content: dict[str, Any]) -> dict[str, Any]:
    """Return the results of ``try`` as plain values; raises ValueError, TypeError or LookupError."""

    def ratio(found: dict[str, Any] | None) -> tuple[float, float, float] | None:
        if found is None:
            return None
        highest = math.inf if found["highest"] is None else float(found["highest"])
        return float(found["mean"]), float(found["lowest"]), highest

    recommended = content["recommended"]
    return {
        "command": "try",
        "script": str(content.get("script", "")),
        "rounds": int(content["rounds"]),
        "step_ms": float(content["step_ms"]),
        "settings": [
            {name: str(each[name] or "") for name in ("name", "problem", "learns")} | {"ratio": ratio(each["ratio"])}
            for each in content["settings"]
        ],
        "together": ratio(content["together"]),
        "lines": [str(line) for line in recommended["lines"]] if recommended else [],
    }
