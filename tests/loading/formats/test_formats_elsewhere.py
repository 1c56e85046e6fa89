"""Packs are read by other programs, as the formats' own documentation says."""

import io
import struct
import tarfile

import h5py
import lmdb
import numpy as np
import pandas as pd
from support import packs

COUNT = 20
IMAGES = packs.images(*[(3, 5, 4)] * COUNT)
VARYING = packs.images(*[(3, 1 + number, 4) for number in range(COUNT)])
LABELS = [7 * number - 20 for number in range(COUNT)]


def packed(folder, name, images, labels):
    packs.pack(name, images, labels, folder / "pack")
    return folder / "pack"


def test_numpy_lmdb_and_h5py_read_their_files(tmp_path):
    folder = packed(tmp_path / "npy", "npy", IMAGES, LABELS)
    assert np.array_equal(np.load(folder / "images.npy"), np.stack(IMAGES))
    assert np.load(folder / "labels.npy").tolist() == LABELS
    folder = packed(tmp_path / "lmdb", "lmdb", IMAGES, LABELS)
    with lmdb.open(str(folder / "data.mdb"), subdir=False, readonly=True, lock=False) as environment:
        assert environment.begin().get(struct.pack(">Q", 3)) == IMAGES[3].tobytes()
    with h5py.File(packed(tmp_path, "hdf5", IMAGES, LABELS) / "data.h5") as file:
        assert np.array_equal(file["images"][:], np.stack(IMAGES))
        assert file["labels"][:].tolist() == LABELS


def test_tar_shards_have_the_members_that_webdataset_wants(tmp_path):
    """One sample's members follow one another, with one key, up to the first dot, and an extension that says what."""
    members = []
    for shard in sorted(packed(tmp_path, "tar", IMAGES, LABELS).glob("*.tar")):
        with tarfile.open(shard) as tar:
            members += [(member.name, tar.extractfile(member).read()) for member in tar]
    names = [f"{index:08d}.{extension}" for index in range(COUNT) for extension in ("npy", "cls")]
    assert [name for name, _ in members] == names
    assert all(np.array_equal(np.load(io.BytesIO(data)), IMAGES[i]) for i, (_, data) in enumerate(members[::2]))
    assert [int(data) for _, data in members[1::2]] == LABELS


def test_pandas_reads_parquet(tmp_path):
    table = pd.read_parquet(packed(tmp_path, "parquet", VARYING, LABELS) / "data.parquet")
    assert table["label"].tolist() == LABELS
    for row, image in zip(table.itertuples(), VARYING, strict=True):
        assert np.array_equal(np.frombuffer(row.image, np.uint8).reshape(row.channels, row.height, row.width), image)
