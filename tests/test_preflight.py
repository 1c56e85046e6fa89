import json
import os
import subprocess
import sys
from collections import namedtuple

import pytest

from helpers import __main__ as shell
from helpers import cifar10, config, preflight


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("JUPYTERHUB_SERVICE_PREFIX", raising=False)
    return tmp_path


def row(name):
    return next(row for row in preflight.check().rows if row.name == name)


def test_the_check_names_what_a_reader_needs_to_know(folders):
    text = str(preflight.check())
    names = ["Python", "torch 2", "Cores", "Memory", "Disk for images", "GPU", "JupyterHub", "Images", "Time for all notebooks"]
    assert [name for name in names if name not in text] == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot restrict a process to some cores")
def test_the_check_counts_the_cores_that_this_process_may_use(folders):
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from helpers import preflight
row = next(preflight._cores())
print(row.value, row.problem)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith("1 of the machine's") and "share one core" in output


def test_a_small_shared_memory_is_a_problem_with_a_remedy(folders, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(64e6, 0, 64e6))
    found = next(preflight._shared_memory())
    assert "64 MB" in found.value and "bus error" in found.problem and "--shm-size" in found.remedy


def test_too_little_memory_in_a_container_is_a_problem(folders, monkeypatch):
    monkeypatch.setattr(preflight, "_control_group", lambda name: "1000000000" if name == "memory.max" else "")
    found = row("Memory")
    assert "limited to 1.0 GB" in found.value and found.problem and found.remedy


def test_a_quota_below_the_cores_is_told(folders, monkeypatch):
    monkeypatch.setattr(preflight, "_control_group", lambda name: "150000 100000" if name == "cpu.max" else "")
    found = row("Cores")
    assert "time of 1.5" in found.value and found.problem


def test_a_gpu_that_torch_cannot_use_is_a_problem_with_a_remedy(folders, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "_nvidia", lambda: ("535.1", ["NVIDIA A100"]))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    found = row("GPU")
    assert "A100" in found.value and "535.1" in found.value and "13.2" in found.problem and "TORCH_BACKEND" in found.remedy


def test_behind_a_hub_the_proxy_is_named(folders, monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    assert "/user/ada/proxy/" in row("JupyterHub").value


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_problem(folders):
    folders.chmod(0o500)
    assert "COURSE_RUNS" in row("Disk for runs").remedy


def test_the_estimate_scales_the_recorded_times_by_both_calibrations():
    run = {"seconds": {"00": 60, "01": 120}, "calibration": {"loading": 0.1, "compute": 0.2}}
    minutes = preflight.estimate_minutes({"ci": run}, {"loading": 0.2, "compute": 0.8})
    assert minutes == {"ci": pytest.approx(3 * (2 + 4) / 2)}


def test_the_recorded_times_estimate_this_machines_presets(folders, monkeypatch, tmp_path):
    file = tmp_path / "run-times.json"
    file.write_text(json.dumps({"workshop": {"seconds": {"00": 600}, "calibration": preflight.calibrate()}}))
    monkeypatch.setattr(preflight, "RUN_TIMES", file)
    assert "workshop about" in row("Time for all notebooks").value


def test_the_shell_exits_with_1_only_if_there_is_a_problem(folders, monkeypatch, capsys):
    good, bad = preflight.Row("Cores", "2"), preflight.Row("Memory", "1 GB", "too little", "more")
    for rows, status in (((good,), 0), ((good, bad), 1)):
        monkeypatch.setattr(preflight, "check", lambda rows=rows: preflight.Report(rows))
        assert shell.main(["check"]) == status
    assert "PROBLEM: too little" in capsys.readouterr().out


def test_in_a_notebook_the_report_is_a_table_without_markup_from_its_values():
    page = preflight.Report((preflight.Row("GPU", "<script>", "a & b", "c"),))._repr_html_()
    assert "<td" in page and "&lt;script&gt;" in page and "<script>" not in page


def test_an_error_of_the_course_is_one_line_in_the_shell(folders):
    process = subprocess.run(
        [sys.executable, "-m", "helpers", "prepare"],
        env=os.environ | {"CIFAR10_ARCHIVE": str(folders / "nothing-here.tar.gz")},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert "nothing-here.tar.gz" in process.stderr and "Traceback" not in process.stderr


def test_verifying_finds_the_byte_that_the_quick_check_does_not_look_at(folders, capsys):
    images = cifar10.prepare(drawn=(20, 10), download=False)
    path = images.train / "00007.png"
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    cifar10.prepare(drawn=(20, 10), download=False)
    with pytest.raises(cifar10.DamagedFolder, match="00007.png"):
        cifar10.verify(images.train.parent)


def test_an_unknown_preset_is_named_with_those_there_are(monkeypatch):
    monkeypatch.setenv("COURSE_PRESET", "quick")
    with pytest.raises(config.UnknownPreset, match="'quick'.*ci, workshop, full"):
        config.preset()


def test_the_shell_prints_the_ladder(folders, capsys):
    assert shell.main(["ladder"]) == 0
    assert "No result yet" in capsys.readouterr().out
