"""Packs are read by other programs, as the formats' own documentation says."""

import io
import struct
import tarfile
import zipfile

import h5py
import lmdb
import numpy as np
import pandas as pd
from google.protobuf.descriptor_pb2 import SourceCodeInfo
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from support import packs
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

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


def test_any_zip_program_and_numpy_read_zip(tmp_path):
    shards = sorted(packed(tmp_path, "zip", IMAGES, LABELS).glob("*.zip"))
    arrays = {}
    for shard in shards:
        with zipfile.ZipFile(shard) as archive:
            assert archive.testzip() is None
            assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}
        arrays |= np.load(shard)
    assert all(np.array_equal(arrays[f"{index:08d}"], image) for index, image in enumerate(IMAGES))


def records(path):
    """The records of a TFRecord file as TensorBoard reads them, which checks their checksums."""
    reader = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return
        yield reader.record()


Integers = SourceCodeInfo.Location  # a message of protobuf's own that begins with a list of integers, too


def fields(message):
    """The numbers and contents of the fields of a protobuf message of any type."""
    return [(field.field_number, field.data) for field in UnknownFieldSet(Empty.FromString(message))]


def example(record):
    """A tf.train.Example, as TensorFlow's example.proto has it: names, and lists of bytes (1) or of integers (3)."""
    ((_, features),) = fields(record)
    found = {}
    for _, feature in fields(features):
        (_, name), (_, values) = fields(feature)
        ((kind, values),) = fields(values)
        found[name.decode()] = fields(values)[0][1] if kind == 1 else list(Integers.FromString(values).path)
    return found


def test_tfrecords_are_examples_with_image_shape_and_label_and_an_index_beside_them(tmp_path):
    """The index has begin and length of each record, as DALI's tfrecord2idx writes it."""
    folder, samples = packed(tmp_path, "tfrecord", VARYING, LABELS), []
    for shard in sorted(folder.glob("*.tfrecord")):
        stored = list(records(shard))
        lengths = [len(record) + 16 for record in stored]
        places = [tuple(map(int, line.split())) for line in open(f"{shard}.idx")]
        assert places == list(zip(np.cumsum([0, *lengths])[:-1].tolist(), lengths, strict=True))
        samples += map(example, stored)
    for sample, image, label in zip(samples, VARYING, LABELS, strict=True):
        assert np.array_equal(np.frombuffer(sample["image"], np.uint8).reshape(sample["shape"]), image)
        assert sample["label"] == [label]


def test_pandas_reads_parquet(tmp_path):
    table = pd.read_parquet(packed(tmp_path, "parquet", VARYING, LABELS) / "data.parquet")
    assert table["label"].tolist() == LABELS
    for row, image in zip(table.itertuples(), VARYING, strict=True):
        assert np.array_equal(np.frombuffer(row.image, np.uint8).reshape(row.channels, row.height, row.width), image)
