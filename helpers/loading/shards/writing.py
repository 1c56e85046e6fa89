"""Writing shards, by one process or by many tasks of which each writes its part."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import google_crc32c

from helpers import wording
from helpers.loading.shards.asking import ask
from helpers.loading.shards.index import END, NAME, Index, Piece, UnfinishedShards

_PART = re.compile(r"index-(\d{5,})-of-(\d{5,})\.json")


def pack(
    samples: Sequence[Mapping[str, bytes]],
    store: Any,
    prefix: str = "",
    *,
    shard_bytes: float = 64e6,
    piece_bytes: float = 4e6,
    task: int = 0,
    tasks: int = 1,
) -> Index:
    """Write samples as tar shards, and their index; of several tasks each writes its part of the samples.

    One request writes one shard, so a shard is in the store as a whole or not at all. A task's index is written last.
    The same samples give the same bytes: a task that was killed, or ran twice, is simply run again. A task needs memory
    for one shard, and no disk.

    Parameters
    ----------
    samples : sequence of dict of str to bytes
        A sample by the extensions of its files: ``{"png": ..., "cls": b"3"}``. Only those of this task are read.
    store : obstore store
    prefix : str
        Folder of the shards in the store, with a slash at its end.
    shard_bytes, piece_bytes : float
        A shard, or piece, ends with the sample that reaches so many bytes.
    task, tasks : int
        This task, from 0 on, and how many there are: ``SLURM_ARRAY_TASK_ID`` and ``SLURM_ARRAY_TASK_COUNT`` of a job
        array that counts from 0, or ``RANK`` and ``WORLD_SIZE`` of torchrun. When all are done, `join` makes one index.

    Returns
    -------
    Index
        Of this task's pieces.

    Raises
    ------
    ValueError
        If there is no such task, or if a sample has no file or an extension that cannot be.
    StoreFailed, StoreRefused
    """
    if not 0 <= task < tasks:
        raise ValueError(f"Expected a task from 0 to {tasks - 1} of {tasks}, found {task}.")
    mine = _part(len(samples), task, tasks)
    pieces: list[Piece] = []
    for number, content, cut in _shards(samples, mine, shard_bytes, piece_bytes):
        name = f"shard-{task:05d}-{number:06d}.tar"
        for start, end, count in cut:
            with memoryview(content) as view:
                pieces.append(Piece(name, start, end, count, google_crc32c.value(bytes(view[start:end]))))
        content += bytes(END)
        _put(store, prefix + name, content)
        del content  # or there would be two shards in memory, this one and the next
    index = Index(tuple(pieces))
    _put(store, f"{prefix}index-{task:05d}-of-{tasks:05d}.json", index.to_json())
    if tasks == 1:
        _put(store, prefix + NAME, index.to_json())
    return index


def join(store: Any, prefix: str = "") -> Index:
    """Make one index of those of all tasks. Calling it again does no harm.

    Raises
    ------
    UnfinishedShards
        If a task has not written its index, or if the indexes are of several runs: of another number of tasks each, or
        of other samples.
    StoreFailed, StoreRefused
    """
    where = f"{prefix} in {store}"
    listed = ask(lambda: [entry["path"] for page in store.list(prefix or None) for entry in page], where)
    names = {name.removeprefix(prefix) for name in listed}
    parts = {tuple(map(int, match.groups())): match[0] for match in map(_PART.fullmatch, names) if match}
    runs = sorted({tasks for _, tasks in parts})
    if len(runs) != 1:
        found = " and ".join(f"index-*-of-{tasks:05d}.json" for tasks in runs) or "none"
        raise UnfinishedShards(f"{where}: expected the indexes of one run, found {found}. Delete those of another run.")
    tasks = runs[0]
    missing = [str(task) for task in range(tasks) if (task, tasks) not in parts]
    if missing:
        raise UnfinishedShards(
            f"{where}: {wording.counted(len(missing), 'task')} of {tasks} left no index: {_some(missing)}. Run these "
            "again; the others are done."
        )
    indexes = [_load(store, prefix + parts[task, tasks]) for task in range(tasks)]
    total = sum(map(len, indexes))
    others = [str(task) for task in range(tasks) if len(indexes[task]) != len(_part(total, task, tasks))]
    if others:
        raise UnfinishedShards(
            f"{where}: expected of each task its part of {total:,} samples, found others of tasks {_some(others)}: not "
            "all tasks had the same samples. Run all of them again."
        )
    index = Index(tuple(piece for each in indexes for piece in each.pieces))
    lost = sorted(set(index.shard_bytes) - names)
    if lost:
        raise UnfinishedShards(f"{where}: {_some(lost)} in an index, but not there. Run their tasks again.")
    _put(store, prefix + NAME, index.to_json())
    return index


def _part(total: int, task: int, tasks: int) -> range:
    """Return the numbers of a task's samples."""
    return range(total * task // tasks, total * (task + 1) // tasks)


def _shards(
    samples: Sequence, mine: range, shard_bytes: float, piece_bytes: float
) -> Iterator[tuple[int, bytearray, list[tuple[int, int, int]]]]:
    """Give each shard's number and content, and start, end and samples of its pieces."""
    shard, content, cut, start, count = 0, bytearray(), [], 0, 0
    for number in mine:
        begin = len(content)
        for extension, data in samples[number].items():
            content += _header(number, extension, len(data))
            content += data
            content += bytes(-len(data) % tarfile.BLOCKSIZE)
        if len(content) == begin:
            raise ValueError(f"Sample {number}: expected a file or more, found none.")
        count += 1
        full = len(content) >= shard_bytes or number == mine[-1]
        if full or len(content) - start >= piece_bytes:
            cut.append((start, len(content), count))
            start, count = len(content), 0
        if full:
            yield shard, content, cut
            shard, content, cut, start = shard + 1, bytearray(), [], 0


def _header(number: int, extension: str, size: int) -> bytes:
    name = f"{number:09d}.{extension}"
    if extension == "__key__" or "/" in name or name.endswith(".") or len(name.encode()) > 99:
        raise ValueError(f"{name!r}: expected a short extension without a slash, such as png.")
    header = tarfile.TarInfo(name)  # of no user and no time: the same samples give the same bytes
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT)


def _load(store: Any, path: str) -> Index:
    return Index.from_json(ask(lambda: bytes(store.get(path).bytes()), f"{path} in {store}"), path)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


def _put(store: Any, path: str, content: bytes | bytearray) -> None:
    """Put an object in one request, whatever its size: of an upload in parts, a killed task would leave parts."""
    ask(lambda: store.put(path, content, use_multipart=False), f"{path} in {store}")
