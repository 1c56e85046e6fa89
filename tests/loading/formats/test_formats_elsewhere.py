"""Packs are read by other programs, as the formats' own documentation says."""

import io
import json
import struct
import tarfile
import zipfile

import lmdb
import numpy as np
import pandas as pd
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from support import packs
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from helpers.loading import formats

COUNT = 20
IMAGES = packs.images(*[(3, 5, 4)] * COUNT)
OTHERS = packs.images(*[(3, 10, 8)] * COUNT, seed=1)
VARYING = packs.images(*[(3, 1 + number, 4) for number in range(COUNT)])
LABELS = [7 * number - 20 for number in range(COUNT)]
MISSING_PEER = "not installed: `.venv/bin/uv pip install --override requirements.lock -e '.[peers]'`"


def packed(folder, name, images, labels, **options):
    formats.FORMATS[name].pack(images, labels, folder / "pack", **options)
    return folder / "pack"


def test_numpy_reads_npy(tmp_path):
    folder = packed(tmp_path, "npy", IMAGES, LABELS)
    assert np.array_equal(np.load(folder / "images.npy"), np.stack(IMAGES))
    assert np.load(folder / "labels.npy").tolist() == LABELS


def test_numpy_reads_pairs_of_npy(tmp_path):
    folder = packed(tmp_path, "npy", IMAGES, OTHERS)
    assert np.array_equal(np.load(folder / "labels.npy"), np.stack(OTHERS))


def test_numpy_reads_images_of_several_shapes_as_bytes(tmp_path):
    folder = packed(tmp_path, "npy", VARYING, LABELS)
    assert np.array_equal(np.load(folder / "images.npy"), np.concatenate([image.ravel() for image in VARYING]))


def test_lmdb_reads_the_values_that_are_documented(tmp_path):
    folder = packed(tmp_path, "lmdb", IMAGES, LABELS)
    with lmdb.open(str(folder / "data.mdb"), subdir=False, readonly=True, lock=False) as environment:
        value = environment.begin().get(struct.pack(">QB", 3, 0))
    assert struct.unpack_from("<3Iq", value, 4) == (3, 5, 4, LABELS[3])
    assert value[24:] == IMAGES[3].tobytes()


def test_h5py_reads_hdf5(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(packed(tmp_path, "hdf5", IMAGES, LABELS) / "data.h5") as file:
        assert np.array_equal(file["images"][:], np.stack(IMAGES))
        assert np.array_equal(file["images"][7], IMAGES[7])
        assert file["labels"][:].tolist() == LABELS


def test_tar_shards_have_the_members_that_webdataset_wants(tmp_path):
    """One sample's members follow one another, with one key, up to the first dot, and an extension that says what."""
    folder = packed(tmp_path, "tar", IMAGES, LABELS, shard_bytes=20_000)
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


@pytest.mark.parametrize("pairs", [False, True])
def test_webdataset_reads_tar_shards(tmp_path, pairs):
    webdataset = pytest.importorskip("webdataset", reason=MISSING_PEER)
    folder = packed(tmp_path, "tar", VARYING, OTHERS if pairs else LABELS, shard_bytes=20_000)
    shards = sorted(str(shard) for shard in folder.glob("*.tar"))
    found = list(webdataset.WebDataset(shards, shardshuffle=False).decode())
    assert len(found) == COUNT
    for index, sample in enumerate(found):
        assert np.array_equal(sample["npy"], VARYING[index])
        assert np.array_equal(sample["label.npy"], OTHERS[index]) if pairs else sample["cls"] == LABELS[index]


def dali_batch(read):
    """All samples as a pipeline of DALI on the CPU reads them."""
    dali = pytest.importorskip("nvidia.dali", reason=MISSING_PEER)
    pipeline = dali.pipeline_def(batch_size=COUNT, num_threads=1, device_id=None)(read)()
    pipeline.build()
    return [[np.array(sample) for sample in output] for output in pipeline.run()]


def test_dali_reads_tar_shards(tmp_path):
    folder = packed(tmp_path, "tar", VARYING, LABELS)
    shards = [str(shard) for shard in sorted(folder.glob("*.tar"))]

    def read():
        from nvidia.dali import fn

        arrays, labels = fn.readers.webdataset(paths=shards, ext=["npy", "cls"])
        return fn.decoders.numpy(arrays), labels

    images, labels = dali_batch(read)
    assert all(np.array_equal(image, expected) for image, expected in zip(images, VARYING, strict=True))
    assert [int(label.tobytes()) for label in labels] == LABELS


def test_any_zip_program_and_numpy_read_zip(tmp_path):
    folder = packed(tmp_path, "zip", IMAGES, LABELS)
    with zipfile.ZipFile(folder / "shard-000000.zip") as archive:
        assert archive.testzip() is None
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}
    with np.load(folder / "shard-000000.zip") as arrays:
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
    found = examples(packed(tmp_path, "tfrecord", VARYING, LABELS, shard_bytes=1_000))
    assert len(found) == COUNT
    for example, image, label in zip(found, VARYING, LABELS, strict=True):
        assert np.array_equal(pixels(example, "image", "shape"), image)
        assert list(example.features.feature["label"].int64_list.value) == [label]


def test_tfrecords_of_pairs_are_examples_with_two_images(tmp_path):
    found = examples(packed(tmp_path, "tfrecord", IMAGES, OTHERS))
    for example, image, other in zip(found, IMAGES, OTHERS, strict=True):
        assert np.array_equal(pixels(example, "image", "shape"), image)
        assert np.array_equal(pixels(example, "label", "label_shape"), other)


def test_dali_reads_tfrecords(tmp_path):
    folder = packed(tmp_path, "tfrecord", VARYING, LABELS, shard_bytes=1_000)
    shards = [str(shard) for shard in sorted(folder.glob("*.tfrecord"))]

    def read():
        from nvidia.dali import fn, tfrecord

        features = {
            "image": tfrecord.FixedLenFeature((), tfrecord.string, ""),
            "shape": tfrecord.FixedLenFeature([3], tfrecord.int64, 0),
            "label": tfrecord.FixedLenFeature([1], tfrecord.int64, 0),
        }
        found = fn.readers.tfrecord(path=shards, index_path=[f"{shard}.idx" for shard in shards], features=features)
        return fn.reshape(found["image"], shape=found["shape"]), found["label"]

    images, labels = dali_batch(read)
    assert all(np.array_equal(image, expected) for image, expected in zip(images, VARYING, strict=True))
    assert [label.item() for label in labels] == LABELS


def test_the_package_tfrecord_reads_tfrecords(tmp_path):
    tfrecord = pytest.importorskip("tfrecord", reason=MISSING_PEER)
    folder = packed(tmp_path, "tfrecord", VARYING, LABELS)
    found = list(tfrecord.tfrecord_loader(str(folder / "shard-000000.tfrecord"), None))
    for example, image, label in zip(found, VARYING, LABELS, strict=True):
        assert np.array_equal(np.frombuffer(example["image"], np.uint8).reshape(example["shape"]), image)
        assert example["label"].tolist() == [label]


def test_the_index_beside_tfrecords_has_begin_and_length_of_each_record(tmp_path):
    """As DALI's tfrecord2idx writes it."""
    folder = packed(tmp_path, "tfrecord", VARYING, LABELS, shard_bytes=1_000)
    shards = sorted(folder.glob("*.tfrecord"))
    assert len(shards) > 1
    for shard in shards:
        places = [tuple(map(int, line.split())) for line in open(f"{shard}.idx")]
        lengths = [len(record) + 16 for record in records(shard)]
        assert [length for _, length in places] == lengths
        assert [start for start, _ in places] == np.cumsum([0, *lengths])[:-1].tolist()


def test_pandas_reads_parquet(tmp_path):
    table = pd.read_parquet(packed(tmp_path, "parquet", VARYING, LABELS, rows_per_group=6) / "data.parquet")
    assert table["label"].tolist() == LABELS
    for row, image in zip(table.itertuples(), VARYING, strict=True):
        assert np.array_equal(np.frombuffer(row.image, np.uint8).reshape(row.channels, row.height, row.width), image)


def test_hugging_face_datasets_reads_parquet(tmp_path):
    huggingface = pytest.importorskip("datasets", reason=MISSING_PEER)
    folder = packed(tmp_path, "parquet", VARYING, LABELS, rows_per_group=6)
    rows = huggingface.Dataset.from_parquet(str(folder / "data.parquet"), cache_dir=str(tmp_path / "cache"))
    assert rows["label"] == LABELS
    for row, image in zip(rows, VARYING, strict=True):
        shape = row["channels"], row["height"], row["width"]
        assert np.array_equal(np.frombuffer(row["image"], np.uint8).reshape(shape), image)


def test_the_manifest_says_what_is_in_a_pack(tmp_path):
    folder = packed(tmp_path, "npy", IMAGES, VARYING)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["count"] == COUNT
    assert (manifest["image_shape"], manifest["label_shape"], manifest["labels"]) == ([3, 5, 4], None, "images")
    assert manifest["files"].keys() == {file.name for file in folder.iterdir()} - {"manifest.json"}
