"""Whether a machine is ready for a class: by figures whose results are calculated by hand here, and on this machine."""

import os
import re
from unittest import mock

import pytest

from helpers import __main__ as shell
from helpers.data import cifar10
from helpers.lessons import classroom, execute, preflight
from stepscope.base import machine as base


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 8 cores, 16 GB of memory, 10 GB of disk, recorded times, and images that are prepared."""
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(base, "cores", lambda: 8)
    monkeypatch.setattr(base, "cpu_quota", lambda: None)
    monkeypatch.setattr(base, "control_group_limits", lambda name: {"pids.max": ["max", "4096"]}[name])
    monkeypatch.setattr(preflight, "available_memory", lambda: 16 * preflight.GB)
    monkeypatch.setattr(classroom.shutil, "disk_usage", lambda path: mock.Mock(free=10e9))
    monkeypatch.setattr(execute, "times_text", lambda: "ci about 6 min")
    cifar10.prepare(drawn=(20, 10), download=False)
    return tmp_path


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
    assert "not prepared" in row("Images", 2).problem and row("Images", 2).remedy == "python -m helpers prepare"


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_images_that_other_accounts_cannot_reach_are_a_problem_for_more_than_one(machine):
    (machine / "data").chmod(0o700)
    assert str(machine / "data") in row("Images", 2).problem and "chmod" in row("Images", 2).remedy
    assert not row("Images", 1).problem
    (machine / "data").chmod(0o750)  # open to the group that a class may be
    assert str(machine / "data") not in row("Images", 2).problem


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
