"""Whether a machine is ready for a class: by figures whose results are calculated by hand here, and on this machine."""

import os
import re
from collections import namedtuple

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
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(classroom.shutil, "disk_usage", lambda path: usage(10e9, 0, 10e9))
    monkeypatch.setattr(execute, "estimate_text", lambda: "ci about 6 min")
    cifar10.prepare(drawn=(20, 10), download=False)
    return tmp_path


def row(name, people):
    return next(row for row in classroom.check(people).rows if row.name == name)


def test_four_people_fit_on_eight_cores_and_a_fifth_does_not(machine):
    assert row("Cores", 4).value == "8 for 4: 2 each" and not row("Cores", 4).problem
    found = row("Cores", 5)
    assert found.value == "8 for 5: 1.6 each"
    assert "at most 4 at a time" in found.remedy and "or 2 machines like this one" in found.remedy


def test_a_quota_counts_and_not_the_cores_that_it_is_of(machine, monkeypatch):
    monkeypatch.setattr(base, "cpu_quota", lambda: 1.5)
    assert row("Cores", 1).value == "1.5 for 1: 1.5 each" and row("Cores", 1).problem


def test_the_memory_of_all_readers_is_needed_at_once(machine):
    assert not row("Memory", 5).problem  # 5 × 3 GB
    found = row("Memory", 6)
    assert found.value == "16.0 GB free, 18.0 GB needed at the most" and found.problem
    assert "at most 5 at a time" in found.remedy


def test_threads_of_all_together_are_no_more_than_the_cores(machine, monkeypatch):
    assert not row("Threads", 8).problem
    monkeypatch.delenv("OMP_NUM_THREADS")
    found = row("Threads", 3)
    assert "together 24 on 8 cores" in found.problem and found.remedy.endswith("OMP_NUM_THREADS=2")
    assert not row("Threads", 1).problem


def test_the_processes_of_a_container_are_limited(machine):
    assert not row("Processes", 64).problem  # 64 people × 16 processes × (3 + 1) threads = 4,096
    found = row("Processes", 65)
    assert "pids.max 4,096" in found.value and "4,160 needed" in found.value and "--pids-limit" in found.remedy


def test_runs_of_all_readers_need_disk_and_a_smaller_preset_less(machine, monkeypatch):
    assert row("Disk", 10).value == "10.0 GB free, 10.0 GB needed at the most" and not row("Disk", 10).problem
    assert "COURSE_PRESET" in row("Disk", 11).remedy
    monkeypatch.setenv("COURSE_PRESET", "ci")
    assert not row("Disk", 11).problem


def test_images_that_nobody_has_prepared_are_a_problem_and_need_disk(machine, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", str(machine / "none"))
    assert "not prepared" in row("Images", 2).problem and row("Images", 2).remedy == "python -m helpers prepare"
    assert row("Disk", 10).value.endswith("11.0 GB needed at the most") and row("Disk", 10).problem


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_images_that_other_accounts_cannot_read_are_a_problem_for_more_than_one(machine):
    (machine / "data").chmod(0o700)
    assert "other accounts cannot read" in row("Images", 2).problem and "chmod" in row("Images", 2).remedy
    assert not row("Images", 1).problem


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize(
    ("outer", "inner", "closed"), [(0o711, 0o755, None), (0o710, 0o750, None), (0o711, 0o711, 1), (0o700, 0o755, 0)]
)
def test_a_folder_is_open_to_others_if_they_may_enter_all_above_it_and_read_it(tmp_path, outer, inner, closed):
    way = [tmp_path / "outer", tmp_path / "outer" / "inner"]
    way[1].mkdir(parents=True)
    way[1].chmod(inner)
    way[0].chmod(outer)
    assert classroom._closed_to_others(way) == (None if closed is None else way[closed])


def test_the_machine_takes_longer_if_all_run_at_once_on_fewer_cores(machine):
    found = row("Machine's time", 16)
    assert found.value.endswith("ci about 6 min") and "2.0 times as long" in found.problem
    assert not row("Machine's time", 8).problem


@pytest.mark.processes
def test_the_command_looks_at_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    status = shell.main(["check", "--people", "1000000"])
    out = capsys.readouterr().out
    names = ["Cores", "Threads", "Memory", "Processes", "Disk", "Images", "Runs", "GPU", "Machine's time"]
    assert status == 1 and [name for name in names if not re.search(f"^{name}  ", out, re.M)] == []
    assert "at most" in out and re.search(r"\d+ problems: Cores, .*Memory", out)
    assert list(tmp_path.iterdir()) == []  # it only looks
