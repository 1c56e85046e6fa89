"""Keeps what was parsed of the last few traces, so that each is parsed once however many tables are made of it."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pandas as pd

    from helpers.traces.columns import Columns
    from helpers.traces.reading import Span, Trace

Recorded = TypeVar("Recorded", "Span", "Trace")
Table = TypeVar("Table", "pd.DataFrame", "Columns")

TRACES = 8  # notebook 11 makes tables of ten, and comes back to the first after four others
EVENTS = 1_000_000  # in all of them, at 64 to 200 bytes, and as much for tables of them; a larger trace is kept alone
TICK = 0.02  # seconds; file systems note the time of a change in steps of 1 to 16 ms

_lock = threading.Lock()  # for what is kept
_kept: dict[tuple, tuple[tuple[Span, ...], dict]] = {}  # spans and tables of all of them; the one used last at the end


def spans(files: Sequence[Path], parse: Callable[[Sequence[Path]], tuple[Span, ...]]) -> tuple[tuple[Span, ...], dict]:
    """Return what `parse` makes of trace files, or what it made of them before if none of them has changed since.

    The second value is for `once`: what was computed of them. A file counts as changed if another file has taken its
    place, or if its size or time of change is another.
    """
    _wait_for_the_next_tick(files)
    key = _identities(files)
    with _lock:
        found = _kept.pop(key, None)
    if found is None:
        found = parse(files), {}
        if _identities(files) != key:
            return found  # changed while it was read
    with _lock:
        _kept[key] = found
        _forget_the_oldest()
    return found


def clear() -> None:
    """Forget all traces."""
    with _lock:
        _kept.clear()


def once(compute: Callable[[Recorded], Table]) -> Callable[[Recorded], Table]:
    """Let `compute` compute its table of a span or trace only once; each caller gets a copy."""

    @functools.wraps(compute)
    def computed(recorded: Recorded) -> Table:
        if compute not in recorded.computed:
            recorded.computed[compute] = compute(recorded)
        return copy(recorded.computed[compute])

    return computed


def copy(table: Table) -> Table:
    """Return a table to which anything may be done without changing `table`."""
    return table.copy(deep=_copies_at_once())


@functools.cache
def _copies_at_once() -> bool:
    """Return whether this version of pandas copies a column now: later ones do it when the column is written to."""
    import pandas as pd

    return int(pd.__version__.split(".")[0]) < 3


def _identities(files: Sequence[Path]) -> tuple:
    return tuple(
        (file.resolve(), status.st_ino, status.st_size, status.st_mtime_ns) for file, status in _statuses(files)
    )


def _wait_for_the_next_tick(files: Sequence[Path]) -> None:
    """Wait until a further change of the files would have another time."""
    age = time.time() - max((status.st_mtime for _, status in _statuses(files)), default=0)
    if 0 <= age < TICK:
        time.sleep(TICK - age)


def _statuses(files: Sequence[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each file with its status; not those that have gone, which whoever parses them will name."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file, file.stat()


def _forget_the_oldest() -> None:
    while len(_kept) > 1 and (len(_kept) > TRACES or sum(map(_events, _kept.values())) > EVENTS):
        del _kept[next(iter(_kept))]


def _events(kept: tuple[tuple[Span, ...], dict]) -> int:
    return sum(len(span.event_columns["start"]) + len(span.memory_columns["start"]) for span in kept[0])
