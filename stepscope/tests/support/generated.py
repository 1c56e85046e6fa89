"""The files that are made from the code: the schema of facts, and the page of rules. To write both again:

PYTHONPATH=stepscope/src:stepscope/tests python -m support.generated
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from stepscope import rules
from stepscope.facts import Facts, saving
from stepscope.facts.job import Job

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
TEXT_OF_THE_PAGE = """# The rules

`stepscope` knows these findings. Each has a key that stays when texts change, and `stepscope rules` prints the same
list in the shell.

"""
DESCRIPTION = (
    "The file facts.json beside a trace, or job.facts.json beside the traces of all ranks. A name ends with its unit; "
    "shares are from 0 to 1. Null is unknown."
)
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def page() -> str:
    """Return the page of rules."""
    return TEXT_OF_THE_PAGE + rules.page()


def schema() -> str:
    """Return the JSON schema of a file of facts, from the type hints of the dataclasses."""
    definitions: dict[str, Any] = {}
    either = {
        name: {"additionalProperties": False, "required": ["version", name]}
        | {"properties": {"version": {"const": saving.VERSION}, name: _of_hint(kind, definitions)}}
        for name, kind in (("facts", Facts), ("job", Job))
    }
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What stepscope measured",
        "description": DESCRIPTION,
        "type": "object",
        "oneOf": [*either.values()],
        "$defs": dict(sorted(definitions.items())),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _of_hint(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; `definitions` get the schemas of the dataclasses in it."""
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        (other,) = (_of_hint(each, definitions) for each in inside if each is not types.NoneType)
        return {"anyOf": [other, {"type": "null"}]} if "$ref" in other else other | {"type": [other["type"], "null"]}
    if kind is tuple and inside[1:] == (...,):
        return {"type": "array", "items": _of_hint(inside[0], definitions)}
    if kind is tuple:
        items = [_of_hint(each, definitions) for each in inside]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if kind is dict:
        return {"type": "object", "additionalProperties": _of_hint(inside[1], definitions)}
    if not dataclasses.is_dataclass(hint):
        return {"type": NAMES[hint]}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # so that a dataclass may hold itself
        definitions[hint.__name__] = _of_dataclass(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _of_dataclass(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass, described by its docstring and by the comments behind its attributes."""
    hints = get_type_hints(kind)
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE))
    fields = dataclasses.fields(kind)
    needed = [each for each in fields if dataclasses.MISSING is each.default is each.default_factory]
    return {
        "description": inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " "),
        "type": "object",
        "additionalProperties": False,
        "required": [each.name for each in needed],
        "properties": {
            each.name: ({"description": comments[each.name]} if each.name in comments else {})
            | _of_hint(hints[each.name], definitions)
            for each in fields
        },
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    saving.SCHEMA.write_text(schema(), encoding="utf-8")
