"""Checks of notebooks 14 and 17: ranges of an object, and a checkpoint that is whole."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch

from helpers.lessons.checks.answering import answered, expect, given


@answered
def merged(written: Callable) -> str:
    """Notebook 14: ``written(ranges, gap)`` returns the requests that read the ranges."""
    three = [(0, 4), (6, 9), (20, 25)]
    for ranges, gap, right in (
        (three, 2, [(0, 9), (20, 25)]), (three, 1, three), ([(0, 4), (4, 8)], 0, [(0, 8)]),
        ([(0, 10), (2, 5), (11, 12)], 1, [(0, 12)]), ([], 5, []),
    ):  # fmt: skip
        case, mine = f"{ranges}, gap {gap}", list(ranges)
        with given(case):
            found = written(mine, gap)
        expect(isinstance(found, list), "a list", type(found).__name__, case)
        expect(list(map(tuple, found)) == right, right, found, case)
        expect(mine == ranges, "the list that was given, unchanged", mine, case)
    return "ranges that lie near each other are one request, and no byte is lost."


@answered
def whole_checkpoint(save: Callable, load: Callable) -> str:
    """Notebook 17: ``save(path, state)`` replaces a file at once; ``load(path)`` refuses one that is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path, state = Path(folder, "kept.pt"), {"step": 2, "weights": torch.ones(100_000)}
        fsync, flushed, sources = os.fsync, [], set()
        torch.save({"step": 1}, path)
        older = path.stat().st_ino  # the number of the file

        def flush(file: int | IO) -> None:
            fsync(file)
            size = os.fstat(file if isinstance(file, int) else file.fileno()).st_size
            flushed.append((size, path.exists() and path.stat().st_ino == older))

        def watched(move: Callable) -> Callable:
            def moved(source: Path, *target: Path, **named: object) -> None:
                sources.update([Path(source).resolve()] * len(target))
                move(source, *target, **named)
                expect(path.exists(), "a file there at each moment", f"none after os.{move.__name__}", "while saving")

            return moved

        moves: dict[str, Any] = {name: watched(getattr(os, name)) for name in ("rename", "replace", "remove", "unlink")}
        with mock.patch.multiple(os, fsync=flush, **moves):
            save(path, state)
        _expect_step(2, path, "after saving")
        expect(path.stat().st_ino != older, "a new file, renamed", "the old one, written over", "after saving")
        beside, hint = {path.parent.resolve()}, "From another file system it is copied, not renamed."
        expect({new.parent for new in sources} <= beside, "a new file beside the old one", "one elsewhere", hint=hint)
        expect(flushed, "a call of os.fsync", "none", "while saving")
        whole = [before for size, before in flushed if size == path.stat().st_size]
        expect(whole, "os.fsync of all bytes of the new file", "another", "while saving")
        expect(any(whole), "os.fsync while the old state is in its place", "it later", "while saving")
        with suppress(Exception):
            save(path, state | {"step": lambda: 3})  # which cannot be saved
        _expect_step(2, path, "after an error while saving")
        for new in sources:
            new.write_bytes(path.read_bytes()[:1000])
        with given(crashed := "after a crash that left the beginning of a file"):
            save(path, state | {"step": 4})
        _expect_step(4, path, crashed)
        found = load(path)
        expect(found and found["step"] == 4, "the state", found, "a whole file")
        content = path.read_bytes()
        middle = len(content) // 2  # a byte of a weight
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for title, damaged in {"one bit flipped": flipped, "half a file": content[:middle]}.items():
            path.write_bytes(damaged)
            try:
                found = load(path)
            except Exception:
                continue
            expect(False, "an error", "None" if found is None else "a state", title)
    return "the file has the new state or still the old one, and what is damaged is refused."


def _expect_step(step: int, path: Path, case: str) -> None:
    try:
        found = f"that of step {torch.load(path, weights_only=True)['step']}"
    except Exception:
        found = "a file that cannot be loaded"
    expect(found == f"that of step {step}", f"the state of step {step}", found, case)
