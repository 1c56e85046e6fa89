"""Preparing CIFAR-10: from every source, whole or not at all, and never from a file that is not what it seems."""

import errno
import gzip
import hashlib
import http.server
import io
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import config, staging
from helpers.data import cifar10, synthetic

# Its processes start at once, with the module loaded. All tests share one server, so it has what others need, too.
SERVER = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None)
SERVER.set_forkserver_preload(
    ["helpers.lessons.faults.child", "torchvision.transforms", "helpers.data.cifar10", __name__]
)
PROJECT = config.PROJECT
DRAWN = (300, 100)


def prepare(data_dir, **options):
    return cifar10.prepare(**{"data_dir": data_dir, "drawn": DRAWN, "download": False, "progress": False, **options})


# ---------------------------------------------------------------------------------------------------------------------
# Sources


@pytest.mark.processes
def test_the_real_archive_comes_back_bit_by_bit(tmp_path, real_archive):
    prepared = prepare(tmp_path, archive=real_archive)
    with tarfile.open(real_archive) as tar:
        batches = {
            Path(member.name).name: pickle.load(tar.extractfile(member), encoding="bytes")
            for member in tar
            if "_batch" in member.name
        }
    for folder, names in ((prepared.train, [f"data_batch_{k}" for k in range(1, 6)]), (prepared.test, ["test_batch"])):
        pixels = np.concatenate([batches[name][b"data"] for name in names])
        labels = [label for name in names for label in batches[name][b"labels"]]
        table = folder.joinpath("labels.csv").read_text().splitlines()
        assert table == ["file,label", *(f"{number:05d}.png,{label}" for number, label in enumerate(labels))]
        for number, expected in enumerate(pixels):
            image = np.asarray(Image.open(folder / f"{number:05d}.png"))
            assert np.array_equal(image.transpose(2, 0, 1).reshape(-1), expected)


def test_a_subset_says_so(tmp_path, archive):
    prepared = prepare(tmp_path / "data", archive=archive)
    assert prepared.source == "CIFAR-10 subset (40 + 10 images)"
    assert (prepared.train_images, prepared.test_images, prepared.classes) == (40, 10, cifar10.CLASSES)


@pytest.mark.slow
def test_all_60000_images_are_cifar10(tmp_path):
    write_archive(tmp_path / "all.tar", train=[10_000] * 5, test=10_000)
    assert cifar10._read_archive(tmp_path / "all.tar").source == "CIFAR-10"


def test_batches_are_taken_in_the_order_of_their_numbers(tmp_path):
    write_folder(tmp_path / "mine", train=[1] * 11, test=1, labels=lambda name: [int("0" + name[11:]) % 10])
    prepared = prepare(tmp_path / "data", archive=tmp_path / "mine")  # read by name: 1, 10, 11, 2, …
    labels = [row.split(",")[1] for row in prepared.train.joinpath("labels.csv").read_text().split()[1:]]
    assert labels == list("12345678901")


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "mine.tgz", "mine.tar"])
def test_an_archive_lying_in_the_data_folder_is_found(tmp_path, name):
    write_archive(tmp_path / name)
    assert prepare(tmp_path).source.startswith("CIFAR-10")


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "mine"])
def test_an_extracted_folder_lying_in_the_data_folder_is_found(tmp_path, name):
    write_folder(tmp_path / name)
    assert prepare(tmp_path).source.startswith("CIFAR-10")


def test_a_folder_may_be_named_by_its_parent(tmp_path):
    write_folder(tmp_path / "mine/cifar-10-batches-py")
    assert prepare(tmp_path / "data", archive=tmp_path / "mine").source.startswith("CIFAR-10")


def test_the_archive_is_named_by_the_environment(tmp_path, archive, monkeypatch):
    monkeypatch.setenv("CIFAR10_ARCHIVE", str(archive))
    assert prepare(tmp_path / "data").source.startswith("CIFAR-10")


def test_other_tar_files_in_the_data_folder_are_ignored(tmp_path):
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as tar:
        add(tar, "notes/readme.txt", b"hello")
    tmp_path.joinpath("broken.tar.gz").write_bytes(b"no archive")
    assert prepare(tmp_path).source.startswith("drawn")


def test_without_an_archive_images_are_drawn_and_the_line_says_how_to_get_real_ones(tmp_path, capsys):
    prepared = prepare(tmp_path)
    assert prepared.source == "drawn images (300 + 100)"
    assert prepared.classes == synthetic.CLASSES
    (line,) = capsys.readouterr().out.splitlines()
    assert prepared.source in line and "CIFAR10_ARCHIVE" in line and "python -m helpers prepare" in line


def test_drawn_images_on_disk_are_those_of_synthetic(tmp_path):
    prepared = prepare(tmp_path)
    for folder, seed, count in ((prepared.train, config.SEED, 300), (prepared.test, config.SEED + 1, 100)):
        images, labels = synthetic.draw(count, seed)
        assert folder.joinpath("labels.csv").read_text().split()[1:] == [
            f"{number:05d}.png,{label}" for number, label in enumerate(labels)
        ]
        assert all(np.array_equal(Image.open(folder / f"{k:05d}.png"), image) for k, image in enumerate(images))


def test_real_images_take_the_place_of_drawn_ones_when_they_arrive(tmp_path):
    drawn = prepare(tmp_path)
    write_archive(tmp_path / "cifar-10-python.tar.gz")
    assert prepare(tmp_path).source.startswith("CIFAR-10")
    cifar10.verify(drawn.train.parent, progress=False)


def test_prepared_images_are_used_again_and_one_line_says_so(tmp_path, archive, capsys):
    first = prepare(tmp_path, archive=archive)
    archive.unlink()
    capsys.readouterr()
    assert prepare(tmp_path) == first
    (line,) = capsys.readouterr().out.splitlines()
    assert first.source in line and "found" in line


def test_prepared_images_of_another_archive_are_used_and_a_line_says_how_to_change_that(tmp_path, archive, capsys):
    prepare(tmp_path / "data", archive=archive)
    other = write_archive(tmp_path / "other.tar.gz", train=[5])
    capsys.readouterr()
    assert prepare(tmp_path / "data", archive=other).train_images == 40
    first, second = capsys.readouterr().out.splitlines()
    assert "found" in first and str(other) in second and f"delete {tmp_path / 'data' / 'cifar10'}" in second


def test_a_named_archive_that_does_not_exist_is_an_error_even_beside_drawn_images(tmp_path):
    prepare(tmp_path)
    with pytest.raises(cifar10.UnusableArchive, match="nowhere.tar.gz: no such file"):
        prepare(tmp_path, archive=tmp_path / "nowhere.tar.gz")


def test_images_prepared_in_a_read_only_folder_can_be_used(tmp_path):
    first = prepare(tmp_path)
    tmp_path.joinpath(".preparing.lock").unlink()
    before = sorted(tmp_path.iterdir())
    tmp_path.chmod(0o555)
    try:
        assert prepare(tmp_path) == first
    finally:
        tmp_path.chmod(0o755)
    assert sorted(tmp_path.iterdir()) == before  # root may write everywhere, so see that nothing was


def test_a_download_is_checked_and_kept(tmp_path, archive, monkeypatch):
    official = serve_as_official(monkeypatch, archive)
    with official:
        prepared = prepare(tmp_path / "data", download=True)
    assert prepared.source == "CIFAR-10 subset (40 + 10 images)"
    assert tmp_path.joinpath("data/cifar-10-python.tar.gz").read_bytes() == archive.read_bytes()


def test_a_download_with_a_wrong_checksum_is_not_used_and_the_line_says_why(tmp_path, archive, monkeypatch, capsys):
    with serve_as_official(monkeypatch, archive, md5="0" * 32):
        prepared = prepare(tmp_path / "data", download=True)
    assert prepared.source.startswith("drawn")
    assert "could not be downloaded" in capsys.readouterr().out
    assert not list(tmp_path.joinpath("data").glob("*.tar.gz"))


def test_a_server_that_never_answers_does_not_hold_up_a_class(tmp_path, monkeypatch, capsys):
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(cifar10, "_CONNECT_SECONDS", 0.3)
    with silent_server() as port:
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{port}/cifar-10-python.tar.gz")
        assert prepare(tmp_path, download=True).source.startswith("drawn")
    assert "timed out" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Archives that are not what they seem


def test_a_hostile_pickle_is_refused_by_name_and_runs_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'it-ran'}",)

    hostile = write_archive(tmp_path / "hostile.tar.gz", replace={"data_batch_1": pickle.dumps(Hostile())})
    with pytest.raises(cifar10.UnusableArchive, match=r"hostile.tar.gz.*data_batch_1.*(posix|nt)\.system"):
        prepare(tmp_path / "data", archive=hostile)
    assert not tmp_path.joinpath("it-ran").exists()
    assert not tmp_path.joinpath("data/cifar10").exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy\nndarray\n((I1000000\nI1000000\ntS'b'\ntR.",
        b"cnumpy\ndtype\n(S'O8'\ntR.",
        b"c_codecs\nencode\n(Vx\nVidna\ntR.",
    ],
)
def test_a_pickle_can_call_nothing_that_images_do_not_need(tmp_path, payload):
    hostile = write_archive(tmp_path / "hostile.tar.gz", replace={"data_batch_1": payload})
    with pytest.raises(cifar10.UnusableArchive, match="data_batch_1 is no batch"):
        prepare(tmp_path / "data", archive=hostile)


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_every_protocol_can_be_read(tmp_path, protocol):
    archive = write_archive(tmp_path / "a.tar", protocol=protocol)
    assert prepare(tmp_path / "data", archive=archive).train_images == 40


def test_pickles_of_python_2_and_numpy_1_can_be_read(tmp_path):
    # As the official archive is written: text for bytes, and NumPy's former name
    pixels, labels = np.arange(3072, dtype=np.uint8).reshape(1, -1), [6]
    batch = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff"
        b"\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + pixels.tobytes() + b"tbU\x06labels]q\x08K\x06au."
    )
    archive = write_archive(tmp_path / "a.tar", train=[1], test=1, replace={"data_batch_1": batch})
    prepared = prepare(tmp_path / "data", archive=archive)
    image = np.asarray(Image.open(prepared.train / "00000.png"))
    assert np.array_equal(image.transpose(2, 0, 1).reshape(1, -1), pixels)
    assert prepared.train.joinpath("labels.csv").read_text().split()[1] == f"00000.png,{labels[0]}"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_archive_is_named(tmp_path, archive, share):
    data = archive.read_bytes()
    official = tmp_path / "cifar-10-python.tar.gz"
    official.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(cifar10.UnusableArchive, match="cifar-10-python.tar.gz"):
        prepare(tmp_path)
    assert not tmp_path.joinpath("cifar10").exists()


def test_an_archive_with_a_flipped_bit_is_refused(tmp_path, archive):
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(cifar10.UnusableArchive, match="archive.tar.gz"):
        prepare(tmp_path / "data", archive=archive)


def test_pixels_changed_behind_the_back_of_gzip_are_refused(tmp_path, archive):
    data = archive.read_bytes()
    archive.write_bytes(data[:-8] + bytes(4) + data[-4:])  # gzip keeps its checksum at the end
    with pytest.raises(cifar10.UnusableArchive, match="CRC"):
        prepare(tmp_path / "data", archive=archive)


def test_a_web_page_saved_under_the_official_name_is_named(tmp_path):
    tmp_path.joinpath("cifar-10-python.tar.gz").write_text("<html>Please log in</html>")
    with pytest.raises(cifar10.UnusableArchive, match="cifar-10-python.tar.gz.*web page"):
        prepare(tmp_path)


def test_a_folder_without_a_test_batch_is_named(tmp_path):
    write_folder(tmp_path / "cifar-10-batches-py")
    tmp_path.joinpath("cifar-10-batches-py/test_batch").unlink()
    with pytest.raises(cifar10.UnusableArchive, match="cifar-10-batches-py: expected .* and test_batch"):
        prepare(tmp_path)


@pytest.mark.parametrize("name", ["../data_batch_1", "/tmp/data_batch_1", "a/../../data_batch_1", "../a/data_batch_1"])
def test_paths_that_leave_the_archive_are_not_followed(tmp_path, name):
    data_dir, hostile = tmp_path / "below/below/data", tmp_path / "hostile.tar"
    with tarfile.open(hostile, "w") as tar:
        add(tar, name, batch(4))
        add(tar, "a/test_batch", batch(4))
    data_dir.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(cifar10.UnusableArchive, match="hostile.tar: expected data_batch_1"):
        prepare(data_dir, archive=hostile)
    assert set(tmp_path.rglob("*")) - before == {data_dir / ".preparing.lock"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_in_an_archive_are_not_followed(tmp_path, kind):
    secret = tmp_path / "secret"
    secret.write_bytes(batch(4))
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        member = tarfile.TarInfo("a/data_batch_1")
        member.type, member.linkname = kind, str(secret)
        tar.addfile(member)
        add(tar, "a/test_batch", batch(4))
    with pytest.raises(cifar10.UnusableArchive, match="expected a/data_batch_1 to be a file"):
        prepare(tmp_path / "data", archive=tmp_path / "hostile.tar")


def test_a_member_too_large_for_memory_is_refused_unread(tmp_path):
    bomb = tmp_path / "bomb.tar.gz"
    header = tarfile.TarInfo("a/data_batch_1")
    header.size = 2**40
    bomb.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT)))
    with pytest.raises(cifar10.UnusableArchive, match="at most for a/data_batch_1, found 1048576 MiB"):
        prepare(tmp_path / "data", archive=bomb)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]}, "whole numbers"),
        ({"data": np.zeros((2, 3072), np.int8), "labels": [0, 1]}, "found int8"),
        ({"data": np.zeros((2, 1024), np.uint8), "labels": [0, 1]}, r"found uint8 of shape \(2, 1024\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "found 1 and 2"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "labels from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1]}, "labels from 0 to 9"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "found 0 and 0"),
        ({"labels": [0]}, "found NoneType"),
        ([1, 2], "found list"),
    ],
)
def test_a_batch_that_is_not_as_expected_is_named_with_what_was_found(tmp_path, content, complaint):
    wrong = write_archive(tmp_path / "wrong.tar", replace={"data_batch_2": pickle.dumps(content, 4)})
    with pytest.raises(cifar10.UnusableArchive, match=f"wrong.tar.*{complaint}"):
        prepare(tmp_path / "data", archive=wrong)


def test_a_batch_that_comes_twice_is_refused(tmp_path):
    with tarfile.open(write_archive(tmp_path / "twice.tar"), "a") as tar:
        add(tar, "cifar-10-batches-py/data_batch_1", batch(4))
    with pytest.raises(cifar10.UnusableArchive, match="expected data_batch_1 once"):
        prepare(tmp_path / "data", archive=tmp_path / "twice.tar")


def test_other_class_names_are_refused(tmp_path):
    meta = pickle.dumps({"label_names": ["cat"] * 10}, 2)
    other = write_archive(tmp_path / "other.tar", replace={"batches.meta": meta})
    with pytest.raises(cifar10.UnusableArchive, match="class names"):
        prepare(tmp_path / "data", archive=other)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def remove(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def append(path):
    with open(path, "ab") as file:
        file.write(b"00001.png,1\n")


@pytest.mark.parametrize("damage", [remove, truncate, append])
@pytest.mark.parametrize(
    "file", ["train/00007.png", "test/00099.png", "train/labels.csv", "test/labels.csv", "manifest.json"]
)
def test_a_damaged_folder_is_refused_with_the_file_and_the_remedy(tmp_path, damage, file):
    folder = prepare(tmp_path).train.parent
    damage(folder / file)
    with pytest.raises(staging.DamagedFolder) as error:
        prepare(tmp_path)
    assert str(error.value).startswith(str(folder / file))
    assert f"Delete the folder {folder} and run `python -m helpers prepare`" in str(error.value)


def test_an_added_image_is_refused(tmp_path):
    folder = prepare(tmp_path).train
    shutil.copy(folder / "00000.png", folder / "00300.png")
    with pytest.raises(staging.DamagedFolder, match="00300.png: this image was added"):
        prepare(tmp_path)


def test_a_changed_label_is_refused(tmp_path):
    table = prepare(tmp_path).train / "labels.csv"
    text = table.read_text()
    table.write_text(text[:-2] + str((int(text[-2]) + 1) % 10) + "\n")
    with pytest.raises(staging.DamagedFolder, match="labels.csv"):
        prepare(tmp_path)


def test_a_missing_part_is_refused(tmp_path):
    folder = prepare(tmp_path).train.parent
    shutil.rmtree(folder / "test")
    with pytest.raises(staging.DamagedFolder, match="test.*missing"):
        prepare(tmp_path)


def test_a_folder_of_another_version_is_refused(tmp_path):
    manifest = prepare(tmp_path).train.parent / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    with pytest.raises(staging.DamagedFolder, match="another version of the course"):
        prepare(tmp_path)


def test_after_the_remedy_the_images_are_back(tmp_path):
    folder = prepare(tmp_path).train.parent
    remove(folder / "train/00000.png")
    shutil.rmtree(folder)
    assert prepare(tmp_path).train.joinpath("00000.png").exists()


def test_verify_finds_a_flipped_bit_wherever_it_is(tmp_path):
    prepared = prepare(tmp_path, drawn=(20, 10))
    folder, image = prepared.train.parent, prepared.train / "00003.png"
    data = image.read_bytes()
    cifar10.verify(folder, progress=False)
    for place in range(0, len(data), 20):
        image.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(staging.DamagedFolder, match="00003.png"):
            cifar10.verify(folder, progress=False)


# ---------------------------------------------------------------------------------------------------------------------
# Whole or not at all, once, and room on the disk


def prepare_and_die(data_dir, moment, moments):
    """Prepare images, and be killed at a moment: when a file or folder in `data_dir` is opened, made or renamed.

    Without a moment, count them.
    """
    numbers = itertools.count()

    def count(event, arguments):
        counted = event in ("open", "os.mkdir", "os.rename") and str(data_dir) in str(arguments[0])
        if counted and next(numbers) == moment:
            os.kill(os.getpid(), 9)

    sys.addaudithook(count)
    prepare(data_dir)
    moments.value = next(numbers)


@pytest.mark.slow
def test_killed_at_any_of_20_moments_there_is_everything_or_nothing_and_the_next_run_succeeds(tmp_path):
    def run(name, moment):
        process = SERVER.Process(target=prepare_and_die, args=(tmp_path / name, moment, moments))
        process.start()
        process.join()
        return tmp_path / name, process.exitcode

    moments = SERVER.Value("i")
    run("undisturbed", None)
    last = moments.value - 1
    in_the_middle = 0
    for moment in [*range(0, last - 5, last // 14), *range(last - 4, last + 1)]:
        data_dir, exitcode = run(str(moment), moment)
        assert exitcode not in (0, 1)  # it was killed
        in_the_middle += bool(list(data_dir.glob(".*.staging-*")))
        if (data_dir / "cifar10-drawn-300").exists():
            cifar10.verify(data_dir / "cifar10-drawn-300", progress=False)
        prepared = prepare(data_dir)
        cifar10.verify(prepared.train.parent, progress=False)
        assert {path.name for path in data_dir.iterdir()} - {".preparing.lock"} == {"cifar10-drawn-300"}
    assert in_the_middle > 10


@pytest.mark.processes
def test_of_eight_processes_one_does_the_work_and_the_others_wait_and_say_so(tmp_path):
    code = (
        "import pathlib, sys; from helpers.data import cifar10; "
        "cifar10.prepare(data_dir=pathlib.Path(sys.argv[1]), drawn=(300, 100), download=False, progress=False)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with staging.only_one_process(tmp_path):  # so that all are there before one of them begins
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) for _ in range(8)]
        for process in processes:
            assert process.stdout.readline().startswith("Another process is preparing images")
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert [output.count("\n") for output in outputs] == [1] * 8
    assert sum("made in" in output for output in outputs) == 1
    assert sum("found in" in output for output in outputs) == 7


def test_too_little_disk_is_said_before_anything_is_written(small_disk):
    with pytest.raises(staging.NotEnoughDisk, match=r"60,000 images need 246 MB, found 2 MB free"):
        prepare(small_disk, drawn=(50_000, 10_000))
    assert [path.name for path in small_disk.iterdir()] == [".preparing.lock"]


def test_too_few_inodes_are_said_before_anything_is_written(small_disk):
    with pytest.raises(staging.NotEnoughDisk, match=r"350 images need as many inodes, found \d+ free"):
        prepare(small_disk, drawn=(250, 100))


def test_a_disk_that_becomes_full_leaves_nothing_behind(small_disk, monkeypatch):
    monkeypatch.setattr(staging, "check_free", lambda *_: None)
    with pytest.raises(staging.NotEnoughDisk, match="became full"):
        prepare(small_disk, drawn=(5_000, 1_000))
    assert [path.name for path in small_disk.iterdir()] == [".preparing.lock"]
    assert prepare(small_disk, drawn=(100, 20)).train_images == 100


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(staging, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".preparing.lock"]


def test_importing_does_not_import_torch():
    code = "import sys; from helpers.data import cifar10; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# What the tests need


@pytest.fixture(autouse=True)
def no_archive_named_from_outside(monkeypatch):
    monkeypatch.delenv("CIFAR10_ARCHIVE", raising=False)


@pytest.fixture
def real_archive():
    path = PROJECT.parent / "shared/data/cifar-10-python-subset.tar.gz"
    if not path.exists():
        pytest.skip(f"no real images: put an archive of some batches of CIFAR-10 at {path}")
    return path


@pytest.fixture
def archive(tmp_path):
    return write_archive(tmp_path / "archive.tar.gz")


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A file system of 2 MB with room for 300 files: a real one on Linux as root, elsewhere a simulated one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=300", "tmpfs", str(disk)]
    if shutil.which("mount") and not subprocess.run(mount, capture_output=True).returncode:
        yield disk
        subprocess.run(["umount", str(disk)], check=True)
    elif hasattr(os, "statvfs"):
        simulate_small_disk(monkeypatch)
        yield disk
    else:
        pytest.skip("this system does not count files")


def simulate_small_disk(monkeypatch):
    """Let the system say of every folder that it is on a small disk, and let no image after the 300th be written."""
    really_write = Path.write_bytes

    def write_bytes(path, data):
        if path.suffix == ".png" and int(path.stem) >= 300:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really_write(path, data)

    found = os.statvfs_result((4096, 4096, 512, 511, 511, 300, 298, 298, 0, 255))  # blocks of 4 KiB, then files
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def batch(count, protocol=2, labels=None, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": pixels, b"labels": labels or [k % 10 for k in range(count)]}, protocol)


def batches(train=(20, 20), test=10, protocol=2, labels=lambda name: None, replace=None):
    counts = {f"data_batch_{k}": count for k, count in enumerate(train, 1)} | {"test_batch": test}
    content = {"batches.meta": pickle.dumps({"label_names": list(cifar10.CLASSES)}, protocol)}
    for seed, (name, count) in enumerate(counts.items()):
        content[name] = batch(count, protocol, labels(name), seed)
    return content | (replace or {})


def write_archive(path, **options):
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as tar:
        for name, content in batches(**options).items():
            add(tar, f"cifar-10-batches-py/{name}", content)
    return path


def write_folder(path, **options):
    path.mkdir(parents=True)
    for name, content in batches(**options).items():
        path.joinpath(name).write_bytes(content)


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@contextmanager
def serve_as_official(monkeypatch, archive, md5=None):
    """Make torchvision's CIFAR-10 the file `archive`, on a server of this machine."""
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(cifar10, "_CONNECT_SECONDS", 120.0)  # the machine may be busy

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=archive.parent)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
        monkeypatch.setattr(CIFAR10, "tgz_md5", md5 or hashlib.md5(archive.read_bytes()).hexdigest())
        yield
        server.shutdown()


@contextmanager
def silent_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
