"""Whether a machine is ready for a class: by figures whose results are calculated by hand here, and on this machine."""

import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from helpers import __main__ as shell
from helpers.data import cifar10, photos
from helpers.lessons import classroom, execute, preflight
from helpers.loading import packs
from stepscope.base import machine as base


@pytest.fixture
def folder():
    """A folder that all accounts may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def machine(folder, monkeypatch):
    """A machine with 8 cores, 16 GB of memory, 10 GB of disk, recorded times, and images that are prepared."""
    monkeypatch.setenv("COURSE_DATA", str(folder / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(folder / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(base, "cores", lambda: 8)
    monkeypatch.setattr(base, "cpu_quota", lambda: None)
    monkeypatch.setattr(base, "control_group_limits", lambda name: {"pids.max": ["max", "4096"]}[name])
    monkeypatch.setattr(base, "available_memory", lambda: 16 * preflight.GB)
    monkeypatch.setattr(classroom.shutil, "disk_usage", lambda path: mock.Mock(free=10e9))
    monkeypatch.setattr(execute, "times_text", lambda: "ci about 6 min")
    images = cifar10.prepare(drawn=(20, 10), download=False)
    images.train.parent.rename(folder / "data" / "cifar10")  # as real images, which are those of every preset
    packs.prepare(cifar10.prepare(download=False))
    photo = photos.folder_of() / "disc" / "00000.jpg"
    photo.parent.mkdir(parents=True)
    photo.touch()
    return folder


def row(name, people):
    return next(row for row in classroom.check(people).rows if row.name == name)


@pytest.mark.parametrize(("name", "fit", "said"), [
    ("Cores", 4, "at most 4 at a time.* or 2 machines"),  # 2 cores each
    ("Memory", 5, "at most 5 at a time"),  # 3 GB each
    ("Processes", 64, "--pids-limit"),  # 64 people × 16 processes × (3 + 1) threads = 4,096
    ("Disk", 10, "COURSE_PRESET"),  # 1 GB each
    ("Machine's time", 12, "COURSE_PRESET=ci"),  # 1.5 times as long
])  # fmt: skip
def test_so_many_fit_and_one_more_is_a_problem_with_a_remedy(machine, name, fit, said):
    assert not row(name, fit).problem
    assert row(name, fit + 1).problem and re.search(said, row(name, fit + 1).remedy)


def test_a_quota_counts_and_not_the_cores_that_it_is_of(machine, monkeypatch):
    monkeypatch.setattr(base, "cpu_quota", lambda: 1.5)
    assert row("Cores", 1).value.startswith("1.5 for 1") and row("Cores", 1).problem


def test_a_training_starts_a_thread_a_core_unless_it_is_told_otherwise(machine, monkeypatch):
    assert not row("Threads", 8).problem
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "together 24 on 8 cores" in row("Threads", 3).problem and row("Threads", 3).remedy.endswith("THREADS=2")


def test_a_smaller_preset_needs_less_disk_and_images_that_nobody_has_prepared_need_more(machine, monkeypatch):
    monkeypatch.setenv("COURSE_PRESET", "ci")
    assert not row("Disk", 32).problem
    monkeypatch.setenv("COURSE_DATA", str(machine / "none"))
    assert row("Disk", 32).problem
    assert "not prepared" in row("Images", 2).problem
    assert row("Images", 2).remedy == "python -m helpers prepare --preset ci"


def test_images_of_another_preset_are_a_problem(machine, monkeypatch):
    assert not row("Images", 2).problem
    monkeypatch.setenv("COURSE_PRESET", "full")  # has more photos
    assert "photos-drawn-2000 is missing" in row("Images", 2).problem
    assert row("Images", 2).remedy == "python -m helpers prepare --preset full"


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("path", [".", "cifar10", "cifar10/train/00000.png", "packs/*/index.npy", "photos-*/disc"])
def test_images_that_other_accounts_cannot_read_are_a_problem_for_more_than_one(machine, path):
    data = machine / "data"
    (closed,) = [data] if path == "." else data.glob(path)
    mode = closed.stat().st_mode
    closed.chmod(mode & 0o700)
    assert str(closed) in row("Images", 2).problem and "chmod -R a+rX" in row("Images", 2).remedy
    assert not row("Images", 1).problem
    closed.chmod(mode & 0o750)
    if os.geteuid() == 0:
        assert row("Images", 2).problem  # the group of root is root's own
        os.chown(closed, -1, 100)
    assert not row("Images", 2).problem  # open to the group that a class may be


def prepare_as_another_account(said):
    """Prepare images in a child that is another account; return its exit status, and what it says."""

    def prepare():
        os.setgid(65534)
        os.setuid(65534)
        with open(said, "w") as sys.stderr:
            sys.exit(shell.main(["prepare"]))

    process = multiprocessing.get_context("fork").Process(target=prepare)
    said.touch()
    said.chmod(0o666)
    process.start()
    process.join()
    return process.exitcode, said.read_text()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root may be another account")
def test_another_account_reads_what_is_open_and_is_told_whom_to_ask_otherwise(machine, monkeypatch):
    drawn = photos.folder_of() / "manifest.json"
    drawn.write_text('{"format": 2, "files": {"disc/00000.jpg": [0, 0]}}')
    assert shell.main(["prepare"]) == 0  # also imports all, which the other account might not
    assert prepare_as_another_account(machine / "opened") == (0, "")
    monkeypatch.setenv("COURSE_PRESET", "full")  # its photos are not there, and cannot be written
    status, said = prepare_as_another_account(machine / "missing")
    assert status == 1 and "prepare --preset" in said
    monkeypatch.delenv("COURSE_PRESET")
    drawn.chmod(0o600)
    status, said = prepare_as_another_account(machine / "closed")
    assert status == 1 and f"chmod -R a+rX {drawn.parent}" in said and "elete the folder" not in said


def test_a_class_of_nobody_is_refused(capsys):
    assert shell.main(["check", "--people", "0"]) == 1
    assert capsys.readouterr().err == "CourseError: Expected 1 person or more, found 0.\n"


@pytest.mark.processes
def test_the_command_looks_at_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    status = shell.main(["check", "--people", "1000000"])
    out = capsys.readouterr().out
    names = ["Cores", "Threads", "Memory", "Processes", "Disk", "Images", "Runs", "GPU", "Machine's time"]
    assert status == 1 and [name for name in names if not re.search(f"^{name}  ", out, re.M)] == []
    assert re.search(r"\d+ problems: Cores, .*Memory", out)
    assert list(tmp_path.iterdir()) == []  # it only looks
