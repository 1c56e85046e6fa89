"""Finds the line that keeps tensors or arrays from one step to the next, in a list, a dict or a deque."""

from __future__ import annotations

import gc
import linecache
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import torch

from stepscope.observe.sampler import Frame

_KINDS = (list, dict, deque)  # not their subclasses, whose methods would run code of the script
_GROWS = r"\b\s*(\.(append|appendleft|extend|insert|setdefault|update)\(|\[.*\]\s*=[^=]|\+=|\|=)"


def sizes() -> dict[int, int]:
    """Return the number of members of each list, dict and deque of this process, by its `id`."""
    return {id(each): len(each) for each in gc.get_objects() if type(each) in _KINDS}


def line(before: Mapping[int, int]) -> str:
    """Return the user's line at which a collection with tensors or arrays has grown since `sizes`; "" if unknown.

    The collection must have a name in the user's functions that run now, or be an attribute of an object with a name.
    """
    grown = {
        id(each)
        for each in gc.get_objects()
        if type(each) in _KINDS and len(each) > before.get(id(each), len(each)) and _holds_arrays(each)
    }
    frame: FrameType | None = sys._getframe(1) if grown else None
    while frame is not None:
        if Frame(frame.f_code.co_filename, 0, "", 0).own:
            for name, value, files in _names(frame):
                if id(value) in grown and (found := _growing(name, files)):
                    return str(found)
        frame = frame.f_back
    return ""


def _holds_arrays(collection: Any) -> bool:
    """Return whether the latest member is a tensor or an array, or contains one."""
    with suppress(Exception):  # another thread may change the collection
        latest = next(reversed(collection.values() if type(collection) is dict else collection))
        parts = latest.values() if type(latest) is dict else latest if type(latest) in (list, tuple) else (latest,)
        return any(isinstance(part, torch.Tensor | np.ndarray) for part in parts)
    return False


def _names(frame: FrameType) -> Iterator[tuple[str, object, list[str]]]:
    """Yield the variables of a function and the attributes of their values, each with the files that may change it."""
    file = frame.f_code.co_filename
    variables = {**frame.f_globals, **frame.f_locals}
    for name, value in variables.items():
        yield name, value, [file]
    for value in variables.values():
        attributes: Any = None
        with suppress(AttributeError):  # `getattr` could run code of the script
            attributes = object.__getattribute__(value, "__dict__")
        of_class = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        for name, inner in [*attributes.items()] if type(attributes) is dict else []:
            yield name, inner, [file, *filter(None, [of_class])]


def _growing(name: str, files: list[str]) -> Frame | None:
    """Return the first of the user's lines that adds to a collection of this name."""
    for file in files:
        for number, text in enumerate(linecache.getlines(file), 1):
            frame = Frame(file, number, "", number)
            if re.search(rf"\b{re.escape(name)}{_GROWS}", text) and frame.own:
                return frame
    return None
