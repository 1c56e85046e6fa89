import contextlib
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import wait_until

from helpers import config
from helpers.simulate import namespaces

REFUSED = namespaces.why_not()
possible = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))
pytestmark = pytest.mark.processes


def inside(number):
    """The processes in a namespace, such as "net:[4026531840]"; those of other users left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "ns" / number.partition(":")[0]).readlink()) == number:
                found.append(int(process.name))
    return found


@possible
def test_each_node_has_a_limited_network_of_its_own_and_the_same_files(tmp_path):
    before = sorted(path.name for path in Path("/sys/class/net").iterdir())
    (tmp_path / "file").write_text("the same")
    script = f"readlink /proc/self/ns/net; echo $RANK of $WORLD_SIZE; cat {tmp_path}/file; echo; tc qdisc show dev eth0"
    outputs = [output.splitlines() for output in namespaces.run(["sh", "-c", script], 25)]
    assert [lines[1:3] for lines in outputs] == [["0 of 2", "the same"], ["1 of 2", "the same"]]
    assert len({outputs[0][0], outputs[1][0], str(Path("/proc/self/ns/net").readlink())}) == 3
    assert all("tbf" in lines[3] and "rate 200Mbit" in lines[3] for lines in outputs)
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == before
    with pytest.raises(ValueError, match="found 0"):
        namespaces.run(["true"], mb_per_s=0)


@possible
def test_a_node_that_fails_or_takes_too_long_is_named_and_all_that_was_started_is_ended():
    shown, fails = "readlink /proc/self/ns/pid; ", "[ $RANK = 0 ] && sleep 1000; echo it is broken; exit 3"
    with pytest.raises(RuntimeError, match="node 1 .*exit code 3(.*\n)*it is broken") as failed:
        namespaces.run(["sh", "-c", shown + fails])
    with pytest.raises(TimeoutError) as late:
        namespaces.run(["sh", "-c", f"(setsid sleep 1000 &); {shown} sleep 1000"], timeout=2)
    lines = f"{failed.value}\n{late.value}".splitlines()
    for number in {line for line in lines if line.startswith("pid:")}:
        wait_until(lambda number=number: not inside(number))


KILLED = """
from helpers.simulate import namespaces

namespaces.run(["sh", "-c", "readlink /proc/self/ns/net /proc/self/ns/pid > $FOLDER/$RANK; sleep 1000"])
"""


@possible
def test_nothing_is_left_when_the_process_is_killed(tmp_path):
    environment = os.environ | {"FOLDER": str(tmp_path), "PYTHONPATH": str(config.PROJECT)}
    process = subprocess.Popen([sys.executable, "-c", KILLED], env=environment)
    seen = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(path.exists() and path.read_text().count("\n") == 2 for path in seen))
        numbers = [number for path in seen for number in path.read_text().split()]
        assert all(map(inside, numbers))
    finally:
        process.kill()
        process.wait()
    for number in numbers:
        wait_until(lambda number=number: not inside(number))


def test_a_missing_tool_is_named_with_its_package_and_another_system_too(monkeypatch, tmp_path):
    monkeypatch.setattr(namespaces, "_PATH", str(tmp_path))
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    assert "iproute2" in namespaces.why_not()
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "darwin" in namespaces.why_not()


@possible
@pytest.mark.parametrize("tool", ["unshare", "tc"])
def test_what_a_tool_says_when_it_is_not_allowed_is_the_reason(monkeypatch, tmp_path, tool):
    refusing = tmp_path / tool
    refusing.write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(namespaces, "_PATH", f"{tmp_path}{os.pathsep}{namespaces._PATH}")
    assert "Operation not permitted" in namespaces.why_not()


SAME_JOB = """
import statistics, sys, time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import simulate

dist.init_process_group("gloo")
# A frame of 1,514 bytes carries 1,448: what is left of the link's rate. From node to node it takes 0.05 ms
network = simulate.SlowNetwork(float(sys.argv[2]) * 1448 / 1514, latency_ms=0.05)
medians = []
for megabytes in (3, 25):
    model = nn.Sequential(*[simulate.SleepingLayer(2, 16, 32) for _ in range(6)])
    model = DistributedDataParallel(model, bucket_cap_mb=megabytes)
    if sys.argv[1] == "simulated":
        model.register_comm_hook(None, network.hook)
    seconds = []
    for _ in range(12):
        begin = time.perf_counter()
        model(torch.ones(4)).sum().backward()
        seconds.append(time.perf_counter() - begin)
    medians.append(statistics.median(seconds[2:]))
    del model
if dist.get_rank() == 0:
    print(*medians)
dist.destroy_process_group()
"""


@possible
@pytest.mark.prove
@pytest.mark.timeout(900)
def test_the_simulated_link_is_like_the_real_one(tmp_path):
    """At 250 Mbit/s: at 1 Gbit/s the kernel needs so much of a core that a busy machine slows the real link."""
    rate, script = 31.25, tmp_path / "job.py"
    script.write_text(SAME_JOB)
    simulated = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    common = {"PYTHONPATH": str(config.PROJECT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    ratios = []
    for _ in range(3):
        real = namespaces.run([sys.executable, script, "real", rate], mb_per_s=rate)[0]
        same = subprocess.check_output([*simulated, "simulated", str(rate)], text=True, env=os.environ | common)
        ratios.append([float(one) / float(other) for one, other in zip(same.split(), real.split(), strict=True)])
    assert [statistics.median(each) for each in zip(*ratios, strict=True)] == pytest.approx([1, 1], abs=0.15)
