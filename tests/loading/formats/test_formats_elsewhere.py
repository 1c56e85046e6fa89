"""Packs are read by other programs, as the formats' own documentation says."""

import io
import struct
import tarfile
import zipfile

import h5py
import lmdb
import numpy as np
import pandas as pd
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
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


def test_numpy_reads_npy(tmp_path):
    folder = packed(tmp_path, "npy", IMAGES, LABELS)
    assert np.array_equal(np.load(folder / "images.npy"), np.stack(IMAGES))
    assert np.load(folder / "labels.npy").tolist() == LABELS


def test_lmdb_reads_the_values_that_are_documented(tmp_path):
    folder = packed(tmp_path, "lmdb", IMAGES, LABELS)
    with lmdb.open(str(folder / "data.mdb"), subdir=False, readonly=True, lock=False) as environment:
        assert environment.begin().get(struct.pack(">Q", 3)) == IMAGES[3].tobytes()


def test_h5py_reads_hdf5(tmp_path):
    with h5py.File(packed(tmp_path, "hdf5", IMAGES, LABELS) / "data.h5") as file:
        assert np.array_equal(file["images"][:], np.stack(IMAGES))
        assert file["labels"][:].tolist() == LABELS


def test_tar_shards_have_the_members_that_webdataset_wants(tmp_path):
    """One sample's members follow one another, with one key, up to the first dot, and an extension that says what."""
    folder = packed(tmp_path, "tar", IMAGES, LABELS)
    shards = sorted(folder.glob("*.tar"))
    names = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                names.append(member.name)
                data = tar.extractfile(member).read()
                index = int(member.name.split(".")[0])
                if member.name.endswith(".npy"):
                    assert np.array_equal(np.load(io.BytesIO(data)), IMAGES[index])
                else:
                    assert int(data) == LABELS[index]
    assert len(shards) > 1
    assert names == [f"{index:08d}.{extension}" for index in range(COUNT) for extension in ("npy", "cls")]


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


def example_class():
    """``tf.train.Example``, from TensorFlow's example.proto and feature.proto."""
    Field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="test", syntax="proto3")

    def message(parent, name, *fields):
        made = parent.add(name=name)
        for number, (field, kind, label) in fields:
            made.field.add(
                name=field, number=number, label=label,
                type=Field.TYPE_MESSAGE if isinstance(kind, str) else kind,
                type_name=f".test.{kind}" if isinstance(kind, str) else None,
            )  # fmt: skip
        return made

    one, many = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
    message(file.message_type, "BytesList", (1, ("value", Field.TYPE_BYTES, many)))
    message(file.message_type, "Int64List", (1, ("value", Field.TYPE_INT64, many)))
    message(file.message_type, "Feature", (1, ("bytes_list", "BytesList", one)), (3, ("int64_list", "Int64List", one)))
    features = message(file.message_type, "Features", (1, ("feature", "Features.FeatureEntry", many)))
    entry = message(
        features.nested_type, "FeatureEntry", (1, ("key", Field.TYPE_STRING, one)), (2, ("value", "Feature", one))
    )
    entry.options.map_entry = True
    message(file.message_type, "Example", (1, ("features", "Features", one)))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Example"))


def examples(folder):
    Example = example_class()
    return [Example.FromString(record) for shard in sorted(folder.glob("*.tfrecord")) for record in records(shard)]


def pixels(example, name, shape):
    feature = example.features.feature
    (data,) = feature[name].bytes_list.value
    return np.frombuffer(data, np.uint8).reshape(feature[shape].int64_list.value)


def test_tfrecords_are_examples_with_image_shape_and_label(tmp_path):
    found = examples(packed(tmp_path, "tfrecord", VARYING, LABELS))
    assert len(found) == COUNT
    for example, image, label in zip(found, VARYING, LABELS, strict=True):
        assert np.array_equal(pixels(example, "image", "shape"), image)
        assert list(example.features.feature["label"].int64_list.value) == [label]


def test_the_index_beside_tfrecords_has_begin_and_length_of_each_record(tmp_path):
    """As DALI's tfrecord2idx writes it."""
    folder = packed(tmp_path, "tfrecord", VARYING, LABELS)
    shards = sorted(folder.glob("*.tfrecord"))
    assert shards
    for shard in shards:
        places = [tuple(map(int, line.split())) for line in open(f"{shard}.idx")]
        lengths = [len(record) + 16 for record in records(shard)]
        assert [length for _, length in places] == lengths
        assert [start for start, _ in places] == np.cumsum([0, *lengths])[:-1].tolist()


def test_pandas_reads_parquet(tmp_path):
    table = pd.read_parquet(packed(tmp_path, "parquet", VARYING, LABELS) / "data.parquet")
    assert table["label"].tolist() == LABELS
    for row, image in zip(table.itertuples(), VARYING, strict=True):
        assert np.array_equal(np.frombuffer(row.image, np.uint8).reshape(row.channels, row.height, row.width), image)
