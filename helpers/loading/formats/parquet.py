"""Parquet: a table in columns, cut into row groups; of all data tools, and of Hugging Face's hub.

The columns are ``image`` (the pixels), ``channels``, ``height``, ``width`` and ``label``: a number, or the pixels of
an image with ``label_channels`` and so on. A row group can only be read as a whole. So random access is slow, and
`RowGroupBatches` makes batches of the images of some row groups at a time.

``row-groups.npy`` has the CRC-32C of each row group; it is compared before the row group is first read. That of the
footer is compared when the file is opened, before Arrow sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from helpers.loading.formats import reading
from helpers.loading.formats.sampling import ShuffledBatches
from helpers.loading.formats.writing import ArrayFile, Samples, checksum, file_checksum, pack_folder, write_manifest

_FILE = "data.parquet"
_SHAPE = ("channels", "height", "width")
_KEPT_GROUPS = 8  # decoded row groups that stay in memory
_ROW = np.dtype([("start", "<i8"), ("checksum", "<u4"), ("first", "<i8")])


def pack(images: Iterable, labels: Iterable, path: str | Path, *, rows_per_group: int = 256) -> None:
    """Pack images into a Parquet file.

    Parameters
    ----------
    images, labels, path
        As for `helpers.loading.formats.npy.pack`.
    rows_per_group : int
        Images in a row group, all of which are in memory when one of them is read.

    Raises
    ------
    PackExists, UnusableSamples
        As there.
    """
    samples = Samples(images, labels, path)
    with pack_folder(path) as folder:
        schema = _schema(samples.pairs)
        # Pixels are different in nearly all images: no dictionary, no compression, no statistics
        with parquet.ParquetWriter(
            folder / _FILE, schema, use_dictionary=False, compression="none", write_statistics=False,
            write_page_checksum=True,
        ) as writer:  # fmt: skip
            rows = []
            for image, label in samples:
                rows.append(_row(image, label))
                if len(rows) == rows_per_group:
                    writer.write_table(_table(rows, schema), row_group_size=rows_per_group)
                    rows = []
            if rows:
                writer.write_table(_table(rows, schema), row_group_size=rows_per_group)
        _write_row_groups(folder)
        write_manifest(folder, "parquet", samples, [_FILE])


class PackedDataset(reading.PackedDataset):
    __doc__ = reading.PackedDataset.__doc__
    format = "parquet"

    def _open(self):
        return _Table(self)

    def _read(self, opened, index):
        group = int(np.searchsorted(opened.firsts, index, "right")) - 1
        images, labels = opened.group(group)
        row = index - int(opened.firsts[group])
        return images[row], labels[row]

    @property
    def row_groups(self) -> np.ndarray:
        """Where row groups begin and end: int of shape (groups + 1,), the index of the first image in each."""
        return self._handle().firsts


class RowGroupBatches(ShuffledBatches):
    """Shuffles row groups, and the images of a few of them at a time, so that a row group is read once in an epoch.

    What is near in the file stays near in the epoch: the file itself must be in a random order.

    Parameters
    ----------
    dataset : PackedDataset
    batch_size : int
        The last batch may be smaller.
    """

    def __init__(self, dataset: PackedDataset, batch_size: int):
        super().__init__(len(dataset), batch_size)
        self._firsts = dataset.row_groups

    def _order(self) -> np.ndarray:
        groups = torch.randperm(len(self._firsts) - 1).split(_KEPT_GROUPS)
        parts = [np.concatenate([np.arange(*self._firsts[group : group + 2]) for group in some]) for some in groups]
        return np.concatenate([part[torch.randperm(len(part)).numpy()] for part in parts])


class _Table:
    """The opened file, with the row groups that were decoded last."""

    def __init__(self, dataset: PackedDataset):
        self._dataset = dataset
        self._rows = dataset._load("row-groups.npy")
        self._bytes = reading.mapped(Path(dataset.path, _FILE))
        self.firsts = self._rows["first"]
        self._checked = set()
        self._check(len(self._rows) - 1)
        self._file = parquet.ParquetFile(pyarrow.BufferReader(pyarrow.py_buffer(self._bytes)))
        self._decoded: dict[int, tuple] = {}

    def group(self, number: int) -> tuple:
        """Images and labels of a row group, each something to take a row of."""
        if (decoded := self._decoded.get(number)) is None:
            self._check(number, int(self.firsts[number]), int(self.firsts[number + 1]) - 1)
            # No threads: those of Arrow do not survive a fork, and there are our own workers
            table = self._file.read_row_group(number, use_threads=False)
            labels = _Images(table, "label", "label_") if self._dataset.pairs else table["label"].to_numpy()
            decoded = self._decoded[number] = _Images(table, "image", ""), labels
            if len(self._decoded) > _KEPT_GROUPS:
                self._decoded.pop(next(iter(self._decoded)), None)  # the first that came
        return decoded

    def _check(self, number: int, *items: int) -> None:
        if number not in self._checked:
            stop = self._rows["start"][number + 1] if number + 1 < len(self._rows) else None
            found = checksum(self._bytes[self._rows["start"][number] : stop])
            self._dataset._expect(int(self._rows["checksum"][number]), found, _FILE, *items)
            self._checked.add(number)


class _Images:
    """A column of pixels, with the columns of their shapes."""

    def __init__(self, table: pyarrow.Table, name: str, prefix: str):
        column = table[name].combine_chunks()
        _, edges, pixels = column.buffers()
        self._edges = np.frombuffer(edges, np.int64)
        self._pixels = np.frombuffer(pixels, np.uint8)
        self._shapes = np.stack([table[prefix + axis].to_numpy() for axis in _SHAPE], 1)

    def __getitem__(self, row: int) -> np.ndarray:
        return self._pixels[self._edges[row] : self._edges[row + 1]].reshape(self._shapes[row])


def _schema(pairs: bool) -> pyarrow.Schema:
    shape = [(axis, pyarrow.int32()) for axis in _SHAPE]
    label = [("label", pyarrow.int64())]
    if pairs:
        label = [("label", pyarrow.large_binary()), *((f"label_{axis}", kind) for axis, kind in shape)]
    return pyarrow.schema([("image", pyarrow.large_binary()), *shape, *label])


def _row(image: np.ndarray, label: int | np.ndarray) -> tuple:
    end = (label.tobytes(), *label.shape) if isinstance(label, np.ndarray) else (label,)
    return (image.tobytes(), *image.shape, *end)


def _table(rows: list[tuple], schema: pyarrow.Schema) -> pyarrow.Table:
    columns = [pyarrow.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return pyarrow.table(columns, schema=schema)


def _write_row_groups(folder: Path) -> None:
    """Write where each row group begins, its checksum and the index of its first image; the footer is the last."""
    path = folder / _FILE
    metadata = parquet.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    ends = [max(_end(group.column(number)) for number in range(group.num_columns)) for group in groups]
    starts = [0, *ends]  # what is before the first row group belongs to it
    firsts = np.cumsum([0, *(group.num_rows for group in groups)])
    rows = ArrayFile(folder / "row-groups.npy", _ROW)
    for start, stop, first in zip(starts, [*ends, path.stat().st_size], firsts, strict=True):
        rows.append(np.array((start, file_checksum(path, start, stop), first), _ROW))
    rows.close(-1)


def _end(column: parquet.ColumnChunkMetaData) -> int:
    """Where the bytes of a column of a row group end; without a dictionary, the first page of data begins it."""
    return column.data_page_offset + column.total_compressed_size
