"""Reads and writes facts: the file ``facts.json`` beside a trace."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from stepscope.base import staging
from stepscope.base.wording import PLAIN_NAMES
from stepscope.facts import Facts
from stepscope.facts.job import LATE_IN, Job
from stepscope.facts.loader import PARTS, REST

Kind = TypeVar("Kind")
_hints = cache(get_type_hints)  # which evaluates each annotation, and takes half of the time for reading a file

VERSION = 1  # raised when the meaning of a fact changes; an added fact has a default, which says that it is unknown
SCHEMA = Path(__file__).with_name("facts.schema.json")
NAME = "facts.json"  # facts of one process; in a job the name of the rank comes first, such as rank_0.facts.json
JOB = "job.facts.json"  # facts of all ranks together


class FactsError(ValueError):
    """A file contains no facts that this version can read. The message says why, and how to proceed."""


def of_folder(folder: Path) -> list[Path]:
    """Return the files of facts directly in a folder; the file of all ranks together is last."""
    found = (file for file in folder.glob(f"*{NAME}") if file.name == NAME or file.name.endswith(f".{NAME}"))
    return sorted(found, key=lambda file: (file.name == JOB, file.name))


def write(facts: Facts | Job, file: Path) -> None:
    """Write facts to a file; the file appears complete or not at all."""
    staging.write(file, json.dumps({"version": VERSION, **as_json(facts)}, indent=1) + "\n")


def as_json(facts: Facts | Job) -> dict[str, Any]:
    """Return facts as types of JSON."""
    return {"job" if isinstance(facts, Job) else "facts": dataclasses.asdict(facts)}


def read(file: Path) -> Facts | Job:
    """Return the facts in a file; raises FactsError, and OSError if the file cannot be read."""
    try:
        return of_json(json.loads(staging.read(file)))
    except FactsError as error:
        raise FactsError(f"{file}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FactsError(
            f"{file}: expected facts as JSON, found no facts or damaged facts ({type(error).__name__} {error}). Record "
            "the loop again, or diagnose its trace."
        ) from error


def of_json(content: Mapping[str, Any]) -> Facts | Job:
    """Return the facts in the parsed content of a file; raises FactsError, ValueError, TypeError or LookupError."""
    if content["version"] != VERSION:
        raise FactsError(
            f"expected facts of version {VERSION}, found {content['version']!r}. Diagnose the trace beside the file "
            "instead, or use the version of stepscope that wrote the file."
        )
    (name,) = content.keys() - {"version"}
    facts: Facts | Job = _object(Job, content[name]) if name == "job" else _object(Facts, content["facts"])
    if not (_complete_job(facts) if isinstance(facts, Job) else _complete(facts)):
        raise ValueError("incomplete facts: for example, there are no steps, or the share of a part is missing")
    return facts


def _complete(facts: Facts) -> bool:
    """Return whether the facts of a process contain the steps, shares and cores that the rules need."""
    items = facts.loader.items if facts.loader else None
    return (
        (facts.profile is None or facts.profile.shares.keys() == PLAIN_NAMES.keys())
        and (facts.loop is None or len(facts.loop.steps) > 0)
        and (items is None or items.parts.keys() == {*PARTS, REST})
        and (facts.machine is None or facts.machine.cores > 0)
    )


def _complete_job(job: Job) -> bool:
    """Return whether the facts of a job contain the ranks and step times that the rules need."""
    return len(job.ranks) > 0 and job.step_ms > 0 and (job.straggler is None or job.late_in in LATE_IN)


def _object(kind: type[Kind], content: object) -> Kind:
    """Return a dataclass with these members; raises an error if a member does not have the type of its attribute."""
    if not isinstance(content, dict):
        raise TypeError(f"expected an object for {kind.__name__}, found {content!r}")
    hints = _hints(kind)  # type: ignore[arg-type]  # a type is hashable
    if unknown := sorted(content.keys() - hints.keys()):
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)}")
    return kind(**{name: _value(hints[name], value) for name, value in content.items()})


def _value(hint: Any, value: Any) -> Any:
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        (other,) = (each for each in inside if each is not types.NoneType)
        return None if value is None else _value(other, value)
    if kind is tuple:
        if len(inside) == 2 and inside[1] is ...:
            inside = inside[:1] * len(_expected(list, value))
        return tuple(_value(each, element) for each, element in zip(inside, _expected(list, value), strict=True))
    if kind is dict:
        return {name: _value(inside[1], element) for name, element in _expected(dict, value).items()}
    if dataclasses.is_dataclass(hint):
        return _object(hint, value)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    return _expected(hint, value)


def _expected(kind: type[Kind], value: object) -> Kind:
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value
