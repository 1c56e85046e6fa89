"""Files of JSON as they may come from anywhere: with bytes turned or cut off, or with odd values in any place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NESTED, MISSING = "50,000 lists in each other", object()
ODD = [
    None, True, -1, 0, 1.5, 1e308, -(10**30), 10**400, float("nan"), float("inf"), "", "7", "\ud800", "\x1b[2J\x00",
    "x" * 300, [], [[[1]]], [None], {}, {"a": {}}, NESTED, MISSING,
]  # fmt: skip
SETTINGS = settings(
    max_examples=int(os.environ.get("TEST_EXAMPLES", "60")),  # `make prove` asks for 300
    derandomize=True,
    database=None,
    suppress_health_check=[*HealthCheck],
)


def each(path: Path, lines: list[object], read: Callable[[Path], object], refused: object) -> None:
    """Damage a file of JSON in many ways, whose `lines` are given; most have but one.

    Each time it is read, or refused by one of our errors, `refused`, which names it or its folder.
    """

    def test(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except refused as error:
            assert str(path.parent) in str(error)  # and not any other ValueError

    SETTINGS(given(damaged(lines))(test))()


def damaged(lines: list[object]) -> st.SearchStrategy[bytes]:
    """Give contents in which one or two values are odd or missing, some bytes are others, or the end is cut off."""
    content, places = _written(lines), list(_places(lines))
    byte = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    odd = st.lists(st.tuples(st.sampled_from(places), st.sampled_from(ODD)), min_size=1, max_size=2).map(dict)
    return st.one_of(
        *[odd.map(lambda changes: _written(_changed(lines, changes)))] * 4,
        st.lists(byte, min_size=1, max_size=3).map(lambda changes: _turned(content, changes)),
        st.integers(0, len(content) - 1).map(lambda end: content[:end]),
    )


def _written(lines: list[object]) -> bytes:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return text.replace(f'"{NESTED}"', "[" * 50_000 + "]" * 50_000).encode()


def _places(value: object, place: tuple = ()) -> Iterator[tuple]:
    """Yield the keys that lead to each value in lists and dicts, the outermost itself not counted."""
    if place:
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*place, key))


def _changed(value: object, changes: dict[tuple, object], place: tuple = ()) -> object:
    if place in changes:
        return changes[place]
    if isinstance(value, dict):
        pairs = ((key, _changed(inner, changes, (*place, key))) for key, inner in value.items())
        return {key: inner for key, inner in pairs if inner is not MISSING}
    if isinstance(value, list):
        changed = (_changed(inner, changes, (*place, number)) for number, inner in enumerate(value))
        return [inner for inner in changed if inner is not MISSING]
    return value


def _turned(content: bytes, changes: list[tuple[int, int]]) -> bytes:
    turned = bytearray(content)
    for place, byte in changes:
        turned[place] = byte
    return bytes(turned)
