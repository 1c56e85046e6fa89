"""Parquet: a table in columns, cut into row groups; all data tools and Hugging Face's hub use it.

The columns are ``image`` (the pixels), ``channels``, ``height``, ``width`` and ``label``. A row group can only be read
as a whole. So random access is slow, and `RowGroupBatches` makes batches of the images of some row groups at a time.

The footer is compared with its checksum when the file is opened, before Arrow sees it. Arrow compares each page that it
reads with the page's checksum, and we each image with ours.
"""

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from helpers.loading.formats.packed_dataset import PackedDataset, ShuffledBatches, damaged
from helpers.loading.formats.packing import Contents

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


class Parquet(PackedDataset):
    """Reads and writes Parquet."""

    format = "parquet"

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        # Pixels are different in nearly all images: no dictionary, no compression, no statistics
        with parquet.ParquetWriter(
            folder / _FILE, _SCHEMA, use_dictionary=False, compression="none", write_statistics=False,
            write_page_checksum=True,
        ) as writer:  # fmt: skip
            rows = []
            for number, (image, label) in enumerate(contents):
                contents.put(number)
                rows.append((image.tobytes(), *image.shape, label))
                if len(rows) == ROWS_PER_GROUP:
                    writer.write_table(_table(rows), row_group_size=ROWS_PER_GROUP)
                    rows = []
            if rows:
                writer.write_table(_table(rows), row_group_size=ROWS_PER_GROUP)
        size = (folder / _FILE).stat().st_size
        footer = parquet.read_metadata(folder / _FILE).serialized_size
        return {_FILE: [(0, 4), (size - _TAIL_BYTES - footer, size)]}

    def _open(self):
        file = parquet.ParquetFile(Path(self.path, _FILE), memory_map=True, page_checksum_verification=True)
        self.rows_per_group = file.metadata.row_group(0).num_rows
        return lru_cache(_KEPT_GROUPS)(partial(_row_group, self.path, file))

    def _read(self, file, start, size):
        group, row = divmod(start, self.rows_per_group)
        edges, pixels = self._opened(group)
        return pixels[edges[row] : edges[row + 1]]


def _row_group(folder: str, file: parquet.ParquetFile, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the images of a row group begin and end, and their pixels."""
    try:
        # No threads: Arrow's do not survive a fork, and we have our own workers
        column = file.read_row_group(group, ["image"], use_threads=False)["image"].combine_chunks()
    except (OSError, pyarrow.ArrowException) as error:
        raise damaged(folder, _FILE, f"row group {group} cannot be read ({error})") from error
    _, edges, pixels = column.buffers()
    return np.frombuffer(edges, np.int64), np.frombuffer(pixels, np.uint8)


def _table(rows: list[tuple]) -> pyarrow.Table:
    columns = zip(zip(*rows, strict=True), _SCHEMA, strict=True)
    return pyarrow.table([pyarrow.array(column, field.type) for column, field in columns], schema=_SCHEMA)


class RowGroupBatches(ShuffledBatches):
    """Shuffles row groups, and the images of a few of them at a time, so that a row group is read once in an epoch.

    Neighbours in the file stay near each other in the epoch: the file itself must be in random order.
    """

    def __init__(self, dataset: Parquet, batch_size: int):
        super().__init__(len(dataset), batch_size)
        dataset[0]  # opens the file
        self._rows_per_group = dataset.rows_per_group

    def _order(self) -> np.ndarray:
        groups = np.split(np.arange(self.count), range(self._rows_per_group, self.count, self._rows_per_group))
        shuffled = torch.randperm(len(groups)).split(_KEPT_GROUPS)
        parts = [np.concatenate([groups[group] for group in some]) for some in shuffled]
        return np.concatenate([part[torch.randperm(len(part)).numpy()] for part in parts])
