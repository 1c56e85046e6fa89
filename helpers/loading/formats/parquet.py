"""Parquet: a table in columns, cut into row groups; of all data tools, and of Hugging Face's hub.

The columns are ``image`` (the pixels), ``channels``, ``height``, ``width`` and ``label``. A row group can only be read
as a whole. So random access is slow, and `RowGroupBatches` makes batches of the images of some row groups at a time.

The footer is compared with its checksum when the file is opened, before Arrow sees it; Arrow compares each page that it
reads with its own, and we each image with ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from helpers.loading.formats import packed_dataset, packing

_FILE = "data.parquet"
ROWS_PER_GROUP = 256  # all are in memory when one of them is read
_KEPT_GROUPS = 8  # decoded row groups that stay in memory
_TAIL_BYTES = 8  # the length of the footer, and the magic number
_SCHEMA = pyarrow.schema(
    {
        "image": pyarrow.large_binary(),
        **dict.fromkeys(("channels", "height", "width"), pyarrow.int32()),
        "label": pyarrow.int64(),
    }
)


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into a Parquet file; all else as `packing.pack` says."""
    packing.pack("parquet", _write, images, labels, path)


def _write(folder: Path, contents: packing.Contents) -> dict[str, list]:
    # Pixels are different in nearly all images: no dictionary, no compression, no statistics
    with parquet.ParquetWriter(
        folder / _FILE, _SCHEMA, use_dictionary=False, compression="none", write_statistics=False,
        write_page_checksum=True,
    ) as writer:  # fmt: skip
        rows = []
        for number, (image, label) in enumerate(contents):
            contents.put(number % ROWS_PER_GROUP, number // ROWS_PER_GROUP)
            rows.append((image.tobytes(), *image.shape, label))
            if len(rows) == ROWS_PER_GROUP:
                writer.write_table(_table(rows), row_group_size=ROWS_PER_GROUP)
                rows = []
        if rows:
            writer.write_table(_table(rows), row_group_size=ROWS_PER_GROUP)
    size = (folder / _FILE).stat().st_size
    footer = parquet.read_metadata(folder / _FILE).serialized_size
    return {_FILE: [(0, 4), (size - _TAIL_BYTES - footer, size)]}


def _table(rows: list[tuple]) -> pyarrow.Table:
    columns = zip(zip(*rows, strict=True), _SCHEMA, strict=True)
    return pyarrow.table([pyarrow.array(column, field.type) for column, field in columns], schema=_SCHEMA)


class PackedDataset(packed_dataset.PackedDataset):
    __doc__ = packed_dataset.PackedDataset.__doc__
    format = "parquet"

    def _open(self):
        file = parquet.ParquetFile(Path(self.path, _FILE), memory_map=True, page_checksum_verification=True)
        return file, {}

    def _read(self, opened, file, start, size):
        parquet_file, groups = opened
        if file not in groups:
            groups[file] = self._decoded(parquet_file, file)
            if len(groups) > _KEPT_GROUPS:
                groups.pop(next(iter(groups)), None)  # the first that came
        edges, pixels = groups[file]
        return pixels[edges[start] : edges[start + 1]]

    def _decoded(self, file: parquet.ParquetFile, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the images of a row group begin and end, and their pixels."""
        try:
            # No threads: those of Arrow do not survive a fork, and there are our own workers
            column = file.read_row_group(group, ["image"], use_threads=False)["image"].combine_chunks()
        except (OSError, pyarrow.ArrowException) as error:
            raise packed_dataset.damaged(self.path, _FILE, f"row group {group} cannot be read ({error})") from error
        _, edges, pixels = column.buffers()
        return np.frombuffer(edges, np.int64), np.frombuffer(pixels, np.uint8)

    def _data_file(self, file):
        return _FILE

    @property
    def row_groups(self) -> np.ndarray:
        """Where row groups begin and end: int of shape (groups + 1,), the index of the first image in each."""
        self._handle()
        return np.append(np.flatnonzero(self._rows["start"] == 0), len(self))


class RowGroupBatches(packed_dataset.ShuffledBatches):
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
