"""Preparing CIFAR-10: from every source, whole or not at all, and never from a file that is not what it seems."""

import functools
import hashlib
import http.server
import io
import os
import pickle
import shutil
import socket
import tarfile
import threading
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from helpers import config
from helpers.data import cifar10, manifests, synthetic
from stepscope.base import staging

DRAWN = (20, 10)


def prepare(data_dir, archive="", **options):
    with mock.patch.dict(os.environ, COURSE_DATA=str(data_dir), **{"CIFAR10_ARCHIVE": str(archive)} if archive else {}):
        return cifar10.prepare(**{"drawn": DRAWN, "download": False} | options)


def batch(count, protocol=2, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": pixels, b"labels": [(seed + k) % 10 for k in range(count)]}, protocol)


def batches(protocol=2, **replace):
    counts = {"data_batch_2": 20, "data_batch_1": 20, "test_batch": 10}
    content = {name: batch(count, protocol, seed) for seed, (name, count) in enumerate(counts.items())}
    return content | {"batches.meta": b"not read"} | replace


def write_archive(path, **options):
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as tar:
        for name, content in batches(**options).items():
            add(tar, f"cifar-10-batches-py/{name}", content)
    return path


def stored(folder):
    """The images in a folder, uint8 of shape (images, 32, 32, 3), and the labels in its table."""
    header, *rows = folder.joinpath("labels.csv").read_text().splitlines()
    names, labels = zip(*[row.split(",") for row in rows], strict=True)
    assert header == "file,label" and list(names) == [f"{number:05d}.png" for number in range(len(rows))]
    return np.stack([np.asarray(Image.open(folder / name)) for name in names]), list(map(int, labels))


def add(tar, name, content, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def archive(tmp_path):
    return write_archive(tmp_path / "archive.tar.gz")


# Sources


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_the_images_of_an_archive_come_back_bit_by_bit_in_the_order_of_its_batches(tmp_path, protocol):
    prepared = prepare(tmp_path / "data", archive=write_archive(tmp_path / "a.tar", protocol=protocol))
    assert prepared.source == "CIFAR-10 subset (40 + 10 images)"
    assert (prepared.train_images, prepared.test_images, prepared.classes) == (40, 10, cifar10.CLASSES)
    content = {name: pickle.loads(data) for name, data in batches().items() if "_batch" in name}
    for folder, names in ((prepared.train, ["data_batch_1", "data_batch_2"]), (prepared.test, ["test_batch"])):
        images, labels = stored(folder)
        pixels = np.concatenate([content[name][b"data"] for name in names])
        assert np.array_equal(images.transpose(0, 3, 1, 2).reshape(-1, 3072), pixels)
        assert labels == [label for name in names for label in content[name][b"labels"]]


def test_the_archive_may_be_a_folder_or_lie_in_the_data_folder(tmp_path):
    folder = tmp_path / "extracted" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in batches().items():
        folder.joinpath(name).write_bytes(content)
    for number, path in enumerate([folder, folder.parent]):
        assert prepare(tmp_path / str(number), archive=path).train_images == 40
    assert prepare(folder.parent).train_images == 40


def test_without_an_archive_images_are_drawn_and_the_line_says_how_to_get_real_ones(tmp_path, capsys):
    prepared = prepare(tmp_path, drawn=(300, 10))
    assert (prepared.source, prepared.classes) == ("drawn images (300 + 10)", synthetic.CLASSES)
    (line,) = capsys.readouterr().out.splitlines()
    assert prepared.source in line and "CIFAR10_ARCHIVE" in line and "python -m helpers prepare" in line
    for folder, seed, count in ((prepared.train, config.SEED, 300), (prepared.test, config.SEED + 1, 10)):
        assert all(map(np.array_equal, stored(folder), synthetic.draw(range(count), seed)))
    write_archive(tmp_path / "cifar-10-python.tar.gz")  # real images take their place when they arrive
    assert prepare(tmp_path).source.startswith("CIFAR-10")


def test_prepared_images_are_used_again_though_read_only_and_the_line_says_what_they_were_made_from(
    tmp_path, archive, capsys
):
    data = tmp_path / "data"
    first = prepare(data, archive=archive)
    archive.unlink()
    (data / ".preparing.lock").unlink()
    capsys.readouterr()
    data.chmod(0o555)
    try:
        assert prepare(data, archive=tmp_path / "other.tar.gz") == first
    finally:
        data.chmod(0o755)
    (line,) = capsys.readouterr().out.splitlines()
    assert first.source in line and archive.name in line and str(data / "cifar10") in line
    assert [path.name for path in data.iterdir()] == ["cifar10"]  # root may write everywhere: see that nothing was


def test_a_download_is_checked_and_kept_and_not_waited_for_without_end(tmp_path, archive, monkeypatch, capsys):
    def downloaded(server_port, md5, patience=120.0):  # the machine may be busy
        monkeypatch.setattr(cifar10, "_CONNECT_SECONDS", patience)
        monkeypatch.setattr("torchvision.datasets.CIFAR10.url", f"http://127.0.0.1:{server_port}/{archive.name}")
        monkeypatch.setattr("torchvision.datasets.CIFAR10.tgz_md5", md5)
        return prepare(tmp_path / f"{md5} {patience}", download=True).source, capsys.readouterr().out

    right, wrong = hashlib.md5(archive.read_bytes()).hexdigest(), "0" * 32
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source, printed = downloaded(silent.getsockname()[1], right, patience=0.3)
    assert source.startswith("drawn") and "timed out" in printed
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=archive.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        source, printed = downloaded(server.server_port, wrong)
        assert source.startswith("drawn") and "could not be downloaded" in printed
        source, _ = downloaded(server.server_port, right)
        server.shutdown()
    assert source == "CIFAR-10 subset (40 + 10 images)"
    (kept,) = tmp_path.glob("*/*.tar.gz")
    assert kept.name == "cifar-10-python.tar.gz" and kept.read_bytes() == archive.read_bytes()


# Archives that are not what they seem


def test_a_hostile_pickle_is_refused_by_name_and_runs_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'it-ran'}",)

    hostile = write_archive(tmp_path / "hostile.tar.gz", data_batch_1=pickle.dumps(Hostile()))
    with pytest.raises(config.CourseError, match=r"hostile.tar.gz.*data_batch_1.*(posix|nt)\.system"):
        prepare(tmp_path / "data", archive=hostile)
    assert not tmp_path.joinpath("it-ran").exists()
    assert not tmp_path.joinpath("data/cifar10").exists()


def test_pickles_of_python_2_and_numpy_1_can_be_read(tmp_path):
    # As the official archive is written: text for bytes, and NumPy's former name
    pixels = np.arange(3072, dtype=np.uint8).reshape(1, -1)
    official = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff"
        b"\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + pixels.tobytes() + b"tbU\x06labels]q\x08K\x06au."
    )
    prepared = prepare(tmp_path / "data", archive=write_archive(tmp_path / "a.tar", data_batch_1=official))
    images, labels = stored(prepared.train)
    assert np.array_equal(images[0].transpose(2, 0, 1).reshape(1, -1), pixels) and labels[0] == 6


def flip_a_bit(data):
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], flip_a_bit, lambda data: b"<html>Please log in</html>"]
)
def test_a_damaged_archive_is_named(tmp_path, archive, damage):
    official = tmp_path / "cifar-10-python.tar.gz"
    official.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(config.CourseError, match="cifar-10-python.tar.gz"):
        prepare(tmp_path)
    assert not tmp_path.joinpath("cifar10").exists()


@pytest.mark.parametrize(("size", "kind"), [(4, tarfile.SYMTYPE), (20, tarfile.REGTYPE)], ids=["a link", "too large"])
def test_what_is_a_link_or_too_large_is_not_read(tmp_path, monkeypatch, size, kind):
    monkeypatch.setattr(cifar10, "_MAX_BATCH_BYTES", 50_000)
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        add(tar, "a/test_batch", batch(4))
        add(tar, "a/data_batch_1", batch(size), kind)
    with pytest.raises(config.CourseError, match="hostile.tar: expected a/data_batch_1"):
        prepare(tmp_path / "data", archive=tmp_path / "hostile.tar")


def test_a_path_in_an_archive_leads_nowhere(tmp_path):
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        add(tar, "../../data_batch_1", batch(4))
        add(tar, "/test_batch", batch(4))
    prepare(tmp_path / "data", archive=tmp_path / "hostile.tar")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "hostile.tar"}
    assert not list(tmp_path.rglob("*_batch*"))


@pytest.mark.parametrize(
    "content",
    [
        {"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1]},
    ],
    ids=["float32", "label 10", "CIFAR-100"],
)
def test_a_batch_of_something_else_is_named(tmp_path, content):
    other = write_archive(tmp_path / "other.tar", data_batch_1=pickle.dumps(content, 2))
    with pytest.raises(config.CourseError, match="other.tar: .*data_batch_1"):
        prepare(tmp_path / "data", archive=other)


# Damage


def replace(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train/00007.png", os.remove),
        ("train/00300.png", lambda path: shutil.copy(path.with_name("00000.png"), path)),
        ("test/labels.csv", replace("00007.png,9", "00007.png,1")),
        ("manifest.json", lambda path: os.truncate(path, 100)),
        ("manifest.json", replace('"format": 2', '"format": 1')),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file_and_the_remedy(tmp_path, file, damage):
    folder = prepare(tmp_path).train.parent
    damage(folder / file)
    with pytest.raises(staging.DamagedFolder) as error:
        prepare(tmp_path)
    assert str(error.value).startswith(str(folder / file))
    assert f"Delete the folder {folder} and run `python -m helpers prepare`" in str(error.value)


def test_verifying_finds_a_flipped_bit(tmp_path):
    prepared = prepare(tmp_path)
    image = prepared.train / "00003.png"
    manifests.check(prepared.train.parent, every_byte=True)
    image.write_bytes(flip_a_bit(image.read_bytes()))
    prepare(tmp_path)
    with pytest.raises(staging.DamagedFolder, match="00003.png"):
        manifests.check(prepared.train.parent, every_byte=True)


# Room


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", mock.Mock(return_value=mock.Mock(free=29 * 4096)))
    with pytest.raises(staging.NotEnoughDisk, match="30 images need"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".preparing.lock"]
