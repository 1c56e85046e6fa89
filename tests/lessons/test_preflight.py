import os
import subprocess
import sys
from unittest import mock

import psutil
import pynvml
import pytest
import torch

from helpers import __main__ as shell
from helpers import config
from helpers.data import cifar10
from helpers.lessons import preflight
from stepscope.base import machine


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    look = psutil.cpu_percent
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: look(interval / 50))  # not for half a second each time
    return tmp_path


def row(name):
    return next(row for row in preflight.check().rows if row.name == name)


def test_the_check_names_what_a_reader_needs_to_know():
    text = str(preflight.check())
    names = ["Python", "torch 2", "Cores", "Memory", "Disk for images", "GPU", "JupyterHub", "Images", "Machine's time"]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("package, module", [("torch", "torch"), ("nvidia-ml-py", "pynvml")])
def test_a_missing_package_is_a_problem_and_the_rest_is_looked_at_all_the_same(monkeypatch, package, module):
    installed = preflight.version
    monkeypatch.setattr(preflight, "version", lambda name: None if name == package else installed(name))
    monkeypatch.setitem(sys.modules, module, None)
    assert package in row("Packages").problem and "make" in row("Packages").remedy
    assert row("Memory").value


def test_a_plugin_that_cannot_be_corrected_is_a_problem(monkeypatch):
    installed = preflight.version
    monkeypatch.setattr(preflight, "version", lambda name: "0.4.4" if "profiler" in name else installed(name))
    found = row("Packages")
    assert "torch-tb-profiler==0.4.3" in found.problem and "0.4.4 (the course was tested with 0.4.3)" in found.value


def test_a_small_shared_memory_is_a_problem_with_a_remedy(monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: mock.Mock(free=64e6))
    found = row("/dev/shm")
    assert "0.06 GB" in found.value and "bus error" in found.problem and "--shm-size" in found.remedy


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Control groups as a batch system makes them: the function sets a limit of the job that this process is in."""
    groups = tmp_path / "cgroup"
    (groups / "slurm" / "job_1" / "step_0").mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/somewhere\n0::/slurm/job_1/step_0\n")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", groups)
    monkeypatch.setattr(machine, "OWN_CONTROL_GROUP", tmp_path / "own")

    def limit(name, job, step="max"):
        (groups / "slurm" / "job_1" / name).write_text(f"{job}\n")
        (groups / "slurm" / "job_1" / "step_0" / name).write_text(f"{step}\n")

    return limit


def test_the_limits_of_a_job_count(job, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    job("memory.max", 1_000_000_000)
    job("cpu.max", "150000 100000", step="max 100000")
    assert "1.00 GB" in row("Memory").value and row("Memory").problem and row("Memory").remedy
    assert row("Cores").value.startswith("2 of") and "time of 1.5" in row("Cores").value and row("Cores").problem


@pytest.mark.parametrize("busy", [0.0, 70.0])
def test_a_busy_machine_is_said_to_be_busy(monkeypatch, busy):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: busy)
    assert ("70% busy" in row("Cores").value) == (busy > 0)


def test_a_container_sees_its_own_limits_at_the_root(job):
    machine.OWN_CONTROL_GROUP.write_text("0::/\n")
    (machine.CONTROL_GROUPS / "cpu.max").write_text("50000 100000\n")
    assert row("Cores").value.startswith("1 of") and "time of 0.5" in row("Cores").value


def test_the_limits_of_a_system_with_version_1_of_control_groups_count(job, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    machine.OWN_CONTROL_GROUP.write_text(
        "4:memory:/slurm/job_1\n2:cpu,cpuacct:/slurm/job_1\n1:name=systemd:/slurm\n0::/\n"
    )
    limits = {
        "cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100_000,
        "cpu/slurm/job_1/cpu.cfs_quota_us": 250_000, "cpu/slurm/job_1/cpu.cfs_period_us": 100_000,
        "memory/memory.limit_in_bytes": 9_223_372_036_854_771_712,
        "memory/slurm/job_1/memory.limit_in_bytes": 1_000_000_000,
    }  # fmt: skip
    for name, limit in limits.items():
        file = machine.CONTROL_GROUPS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert "1.00 GB" in row("Memory").value
    assert row("Cores").value.startswith("3 of") and "time of 2.5" in row("Cores").value


@pytest.mark.parametrize(("cuda", "problem", "remedy"), [(12, "13.2", "TORCH_BACKEND"), (13, "hidden", "CUDA_VIS")])
def test_a_gpu_that_torch_does_not_find_is_named_with_what_is_in_its_way(monkeypatch, cuda, problem, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(preflight, "_nvidia", lambda: ("535.1", cuda, ["NVIDIA A100"]))
    found = row("GPU")
    assert "A100" in found.value and "535.1" in found.value and problem in found.problem and remedy in found.remedy


def test_a_driver_that_does_not_answer_is_a_problem(monkeypatch):
    mismatch = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    monkeypatch.setattr(pynvml, "nvmlInit", mock.Mock(side_effect=mismatch))
    assert "does not answer" in row("GPU").problem and "restart" in row("GPU").remedy


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "TORCH_BACKEND"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "nvidia-smi"),
    ],
)
def test_a_gpu_that_cannot_compute_is_a_problem(monkeypatch, message, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch, "ones", mock.Mock(side_effect=RuntimeError(f"{message}\nmore lines")))
    found = next(preflight._gpu())
    assert found.problem.endswith(message) and remedy in found.remedy


def test_damaged_images_are_a_problem_with_a_remedy(folders):
    (folders / "data" / "cifar10").mkdir(parents=True)
    (folders / "data" / "cifar10" / "manifest.json").write_text("{")
    found = row("Images")
    assert "manifest.json" in found.problem and "delete" in found.remedy


def test_prepared_images_are_named_with_their_source_and_a_staging_folder_is_not_counted():
    images = cifar10.prepare(drawn=(20, 10), download=False)
    assert row("Images") == preflight.Row("Images", "drawn images (20 + 10)")
    images.train.parent.rename(images.train.parent.with_name(".staging-cifar10"))
    assert "not prepared yet" in row("Images").value


def test_an_unknown_preset_is_a_problem_of_the_report(monkeypatch):
    monkeypatch.setenv("COURSE_PRESET", "quick")
    assert "'quick'" in row("Preset").problem and row("Preset").remedy


def test_behind_a_hub_the_proxy_is_named(monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    assert "/user/ada/proxy/" in row("JupyterHub").value


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # the superuser may write anywhere
    assert "COURSE_RUNS" in row("Disk for runs").remedy


def test_the_shell_exits_with_1_only_if_there_is_a_problem(monkeypatch, capsys):
    good, bad = preflight.Row("Cores", "2"), preflight.Row("Memory", "1 GB", "too little", "more")
    for rows, status in (((good,), 0), ((good, bad), 1)):
        monkeypatch.setattr(preflight, "check", lambda rows=rows: preflight.Report(rows))
        assert shell.main(["check"]) == status
    out = capsys.readouterr().out
    assert "PROBLEM: too little" in out and "1 problem: Memory." in out


@pytest.mark.processes
@pytest.mark.parametrize(("command", "said"), [
    (["-m", "helpers", "prepare"], "nothing-here.tar.gz"), (["-S", "-m", "helpers", "check"], "make lab"),
], ids=["an error of the course", "a Python without the course's packages"])  # fmt: skip
def test_what_a_reader_can_put_right_is_one_line_in_the_shell(folders, monkeypatch, command, said):
    monkeypatch.setenv("CIFAR10_ARCHIVE", str(folders / "nothing-here.tar.gz"))
    process = subprocess.run([sys.executable, *command], cwd=config.PROJECT, capture_output=True, text=True)
    assert process.returncode == 1
    assert said in process.stderr and "Traceback" not in process.stderr


@pytest.mark.processes
@pytest.mark.parametrize("name", ["file/x", "n" * 300], ids=["a file in the way", "a name too long"])
@pytest.mark.parametrize("command", ["class", "grade --seed 7"])
def test_what_the_system_refuses_is_one_line_that_names_the_path(folders, capsys, command, name):
    (folders / "file").touch()
    assert shell.main([*command.split(), str(folders / name)]) == 1
    line = "".join(capsys.readouterr()).strip().splitlines()[-1]
    assert str(folders / name) in line
