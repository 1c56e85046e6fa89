"""Checks of notebooks 14 and 17: ranges of an object, and a checkpoint that is whole."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from helpers.lessons.checks.answering import answered, expect


@answered
def merged(written: Callable) -> str:
    """Notebook 14: ``written(ranges, gap)`` returns the requests that read the ranges."""
    three = [(0, 4), (6, 9), (20, 25)]
    for ranges, gap, right in (
        (three, 2, [(0, 9), (20, 25)]),
        (three, 1, three),
        ([(0, 4), (4, 8)], 0, [(0, 8)]),
        ([(0, 10), (2, 5), (11, 12)], 1, [(0, 12)]),
        ([], 5, []),
    ):
        found = written(list(ranges), gap)
        expect(list(map(tuple, found)) == right, right, found, f"{ranges}, gap {gap}")
    return "ranges that lie near each other are one request, and no byte is lost."


@answered
def whole_checkpoint(save: Callable, load: Callable) -> str:
    """Notebook 17: ``save(path, state)`` replaces a file at once; ``load(path)`` refuses one that is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path, state = Path(folder, "kept.pt"), {"step": 2, "weights": torch.ones(100_000)}
        flush, before_it_goes = os.fsync, []
        torch.save({"step": 1}, path)
        older = path.stat().st_ino  # the number of the file

        def flushed(file: int) -> None:
            before_it_goes.append(path.stat().st_ino == older)
            flush(file)

        with mock.patch("os.fsync", flushed):
            save(path, state)
        found = torch.load(path, weights_only=True)["step"]
        expect(found == 2, "the new state", f"that of step {found}", "after saving")
        expect(path.stat().st_ino != older, "a new file, renamed", "the old one, written over", "after saving")
        expect(before_it_goes, "a call of os.fsync", "none", "while saving")
        expect(any(before_it_goes), "os.fsync while the old state is in its place", "it later", "while saving")
        found = load(path)
        expect(found and found["step"] == 2, "the state", found, "a whole file")
        whole = path.read_bytes()
        middle = len(whole) // 2  # a byte of a weight
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for title, damaged in {"one bit flipped": flipped, "half a file": whole[:middle]}.items():
            path.write_bytes(damaged)
            try:
                found = load(path)
            except Exception:
                continue
            expect(False, "an error", f"the state of step {found['step']}", title)
    return "the file has the new state or still the old one, and what is damaged is refused."
