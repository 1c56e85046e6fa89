"""Shards as tar files: written by one process, or by many tasks that each write a part, and read in pieces."""

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
from obstore.store import LocalStore

from helpers.data import buckets
from helpers.loading.shards.index import END, NAME, Index, Piece, ShardsError
from stepscope.base.wording import counted

_BLOCK = tarfile.BLOCKSIZE  # bytes: everything in a tar file begins at a multiple
_PART = "index-{:05d}-of-{:05d}.json"  # the index of a task


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
    """Write samples as tar shards, and their index; each of several tasks writes its part of the samples.

    One request writes one shard, so a shard is in the store as a whole or not at all. A task's index is written last.
    The same samples give the same bytes, so a killed task is simply run again, even twice. A task needs memory for one
    shard, and no disk.

    Parameters
    ----------
    samples : sequence of dict of str to bytes
        Each sample's files by extension: ``{"png": ..., "cls": b"3"}``. Only those of this task are read.
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
    ValueError, StoreError
        If there is no such task, or if a sample has no file or an impossible extension; as `buckets.request` says.
    """
    if not 0 <= task < tasks:
        raise ValueError(f"Expected a task from 0 to {tasks - 1} of {tasks}, found {task}.")
    pieces: list[Piece] = []
    mine = range(len(samples) * task // tasks, len(samples) * (task + 1) // tasks)
    for number, content, cuts in _shards(samples, mine, shard_bytes, piece_bytes):
        name = f"shard-{task:05d}-{number:06d}.tar"
        for start, end, count in cuts:
            pieces.append(Piece(name, start, end, count, google_crc32c.value(bytes(memoryview(content)[start:end]))))
        content += bytes(END)
        _put(store, prefix + name, content)
        del content  # or there would be two shards in memory, this one and the next
    index = Index(tuple(pieces))
    _put(store, prefix + _PART.format(task, tasks), index.to_json())
    if tasks == 1:
        _put(store, prefix + NAME, index.to_json())
    return index


def join(store: Any, prefix: str = "") -> Index:
    """Make one index from those of all tasks. Calling it again does no harm.

    Raises StoreError, as `buckets.request` says, and ShardsError, if a task has not written its index or a shard of it
    is gone, or if the indexes are of several runs, with different numbers of tasks.
    """
    where = f"{prefix} in {store}"
    with buckets.request(where):
        names = {entry["path"].removeprefix(prefix) for page in store.list(prefix or None) for entry in page}
    runs = sorted({name.rpartition("-of-")[2] for name in names if re.fullmatch(r"index-\d+-of-\d+\.json", name)})
    if len(runs) != 1:
        listed = " and ".join(f"index-*-of-{run}" for run in runs) or "none"
        raise ShardsError(f"{where}: expected the indexes of one run, found {listed}. Delete those of another run.")
    tasks = int(runs[0].removesuffix(".json"))
    missing = [task for task in range(tasks) if _PART.format(task, tasks) not in names]
    if missing:
        raise ShardsError(
            f"{where}: {counted(len(missing), 'task')} of {tasks} left no index: {_some(missing)}. Run these again; "
            "the others are done."
        )
    parts = [Index.load(store, prefix, _PART.format(task, tasks)) for task in range(tasks)]
    index = Index(tuple(piece for part in parts for piece in part.pieces))
    lost = sorted(set(index.shard_bytes) - names)
    if lost:
        raise ShardsError(f"{where}: {_some(lost)} in an index, but not in the store. Run their tasks again.")
    _put(store, prefix + NAME, index.to_json())
    return index


def read_samples(piece: bytes) -> list[dict[str, Any]]:
    """Return the samples of a piece: successive members of a tar file with the same stem.

    A sample is a dict of its files, as bytes by their extensions, and of its stem, a str, as ``__key__``. As in
    WebDataset, a member's extension is what follows the first dot of its name: ``seg.png``. Names have less than 100
    bytes, as `pack` and WebDataset write them.
    """
    # Files are copied: views of the piece cost 6 µs a sample more, spent in the garbage collector.
    samples: list[dict[str, Any]] = []
    position, stem = 0, None
    while position < len(piece) and piece[position]:  # a name of no letters: the end of the tar file
        name = piece[position : piece.index(0, position)].decode()
        folder, slash, base = name.rpartition("/")
        key, _, extension = base.partition(".")
        key = folder + slash + key
        if key != stem:
            samples.append({"__key__": key})
            stem = key
        size = int(piece[position + 124 : position + 135], 8)
        position += _BLOCK
        samples[-1][extension] = piece[position : position + size]
        position += -(-size // _BLOCK) * _BLOCK
    return samples


def _shards(
    samples: Sequence, mine: range, shard_bytes: float, piece_bytes: float
) -> Iterator[tuple[int, bytearray, list[tuple[int, int, int]]]]:
    """Yield each shard's number and content, and start, end and samples of its pieces."""
    shard, content, cut, start, count = 0, bytearray(), [], 0, 0
    for number in mine:
        begin = len(content)
        for extension, data in samples[number].items():
            content += _header(number, extension, len(data))
            content += data
            content += bytes(-len(data) % _BLOCK)
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
    header = tarfile.TarInfo(name)  # without user and time: the same samples give the same bytes
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT)


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:20])) + (", …" if len(names) > 20 else "")


def _put(store: Any, path: str, content: bytes | bytearray) -> None:
    """Put an object in one request, whatever its size: a killed task would leave the parts of an upload in parts."""
    if isinstance(store, LocalStore):  # it writes a file "#1" first, and a killed task leaves that
        file = Path(store.prefix or "/", path)
        for left in file.parent.glob(f"{file.name}#*"):
            left.unlink(missing_ok=True)
    with buckets.request(f"{path} in {store}"):
        store.put(path, content, use_multipart=False)
