"""Whether a machine is ready for a class: by figures whose results are calculated by hand here, and on this machine."""

import json
import os
import re
from collections import namedtuple

import pytest

from helpers import __main__ as shell
from helpers import config
from helpers.data import cifar10
from helpers.lessons import classroom, preflight

RECORDED = {
    "seconds": {"03": 60, "08": 120, "11": 180},
    "working": {"03": 0.5, "08": 1.0, "11": 0.9},
    "calibration": {"loading": 0.1, "compute": 0.2},
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 8 cores, 16 GB of memory, 10 GB of disk, recorded times, and images that are prepared."""
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(config, "cores", lambda: 8)
    monkeypatch.setattr(config, "cpu_quota", lambda: None)
    monkeypatch.setattr(config, "control_group_limits", lambda name: {"pids.max": ["max", "4096"]}[name])
    monkeypatch.setattr(preflight, "available_memory", lambda: 16 * preflight.GB)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(classroom.shutil, "disk_usage", lambda path: usage(10e9, 0, 10e9))
    monkeypatch.setattr(preflight, "calibrate", lambda: RECORDED["calibration"])
    (tmp_path / "times.json").write_text(json.dumps({"workshop": RECORDED}))
    monkeypatch.setattr(preflight, "RUN_TIMES", tmp_path / "times.json")
    cifar10.prepare(drawn=(20, 10), download=False)
    return tmp_path


def row(name, people):
    return next(row for row in classroom.check(people).rows if row.name == name)


def test_four_people_fit_on_eight_cores_and_a_fifth_does_not(machine):
    assert row("Cores", 4) == preflight.Row("Cores", "8 for 4: 2 each")
    found = row("Cores", 5)
    assert found.value == "8 for 5: 1.6 each"
    assert "at most 4 at a time" in found.remedy and "or 2 machines like this one" in found.remedy


def test_a_quota_counts_and_not_the_cores_that_it_is_of(machine, monkeypatch):
    monkeypatch.setattr(config, "cpu_quota", lambda: 1.5)
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


def test_ports_are_counted_in_the_range_that_the_system_takes_them_from(machine, monkeypatch):
    (machine / "range").write_text("32768\t33767\n")
    monkeypatch.setattr(classroom, "PORT_RANGE", machine / "range")
    found = row("Ports", 4)
    free = int(re.match(r"([\d,]+) free, 1,200 needed", found.value)[1].replace(",", ""))
    assert 0 < free <= 1000 and "ip_local_port_range" in found.remedy
    (machine / "range").write_text("15000 60999")
    assert not row("Ports", 4).problem


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


def test_a_notebook_takes_as_long_as_alone_or_as_the_cores_need_for_all(machine):
    minutes = preflight.estimate_minutes({"ci": RECORDED}, RECORDED["calibration"], people=3, cores=2)
    # max(60, 3 · 30 / 2) + max(120, 3 · 120 / 2) + max(180, 3 · 162 / 2) seconds
    assert minutes == {"ci": pytest.approx((60 + 180 + 243) / 60)}
    slower = preflight.estimate_minutes({"ci": RECORDED}, {"loading": 0.2, "compute": 0.2}, people=4, cores=1)
    # 03 alone: 30 + 2 · 30, of which 60 are work
    assert slower == {"ci": pytest.approx((240 + 480 + 648) / 60)}
    measured = preflight.estimate_minutes({"ci": RECORDED}, RECORDED["calibration"], {"ci": {"03": 6.0}}, 4, 1)
    assert measured == {"ci": pytest.approx((12 + 480 + 648) / 60)}


def test_the_time_of_each_preset_is_estimated_and_what_is_not_recorded_is_named(machine):
    found = row("Time if all run at once", 16)  # 60 + 16 · 120 / 8 + 16 · 162 / 8 = 624 s
    assert found.value.startswith("ci unknown; workshop about 10 min, alone 6 min; full unknown. Not recorded")
    assert "00, 01, 02" in found.value and "2 times as long" in found.problem
    assert not row("Time if all run at once", 8).problem


@pytest.mark.parametrize("load", [7.0, 9.0])
def test_an_estimate_from_a_busy_machine_says_so(machine, monkeypatch, load):
    monkeypatch.setattr(classroom.psutil, "getloadavg", lambda: (load, 0, 0))
    assert ("Others work here now" in row("Time if all run at once", 1).value) == (load > 8)


@pytest.mark.parametrize("people", ["0", "-3"])
def test_a_class_of_nobody_is_refused_in_one_line(machine, people, capsys):
    assert shell.main(["check", "--people", people]) == 1
    assert re.fullmatch(rf"NobodyToCheckFor: Expected 1 person or more, found {people}: .*\n", capsys.readouterr().err)


@pytest.mark.processes
def test_the_command_looks_at_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    status = shell.main(["check", "--people", "1000000"])
    out = capsys.readouterr().out
    names = ["Cores", "Threads", "Memory", "Processes", "Disk", "Images", "Runs", "GPU", "Time if all run at once"]
    assert status == 1 and [name for name in names if not re.search(f"^{name}  ", out, re.M)] == []
    assert "at most" in out and re.search(r"\d+ problems: Cores, .*Memory", out)
    assert list(tmp_path.iterdir()) == []  # it only looks
