import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ranks import wait_until

from helpers import config, timing, traces
from helpers.simulate import namespaces

REFUSED = namespaces.why_not()
possible = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))
pytestmark = pytest.mark.processes


def inside(kind, number):
    """The processes in a namespace; those of other users left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "ns" / kind).readlink()) == number:
                found.append(int(process.name))
    return found


def links():
    """The interfaces of the machine itself."""
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


@pytest.fixture(scope="module")
def nodes():
    with namespaces.Nodes(2, mb_per_s=125) as nodes:
        yield nodes


# ------------------------------------------------------------------------------------------------------------ the nodes


@possible
def test_each_node_has_a_network_of_its_own_and_the_same_files(nodes, tmp_path):
    (tmp_path / "file").write_text("the same")
    script = f"readlink /proc/self/ns/net; echo $RANK of $WORLD_SIZE; cat {tmp_path}/file"
    outputs = [output.splitlines() for output in nodes.run(["sh", "-c", script])]
    assert [lines[1:] for lines in outputs] == [["0 of 2", "the same"], ["1 of 2", "the same"]]
    assert len({outputs[0][0], outputs[1][0], str(Path("/proc/self/ns/net").readlink())}) == 3


@possible
def test_both_ends_of_each_cable_are_limited_and_the_machines_own_network_is_as_before():
    before = links()
    with namespaces.Nodes(3, mb_per_s=25) as nodes:
        assert nodes.addresses == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert str(nodes) == "3 network namespaces, 25 MB/s by tc tbf"
        for output in nodes.run(["tc", "qdisc", "show", "dev", "eth0"]):
            assert "tbf" in output and "rate 200Mbit" in output
        switch = subprocess.run([*nodes._enter(net=nodes._networks[0]), "tc", "qdisc"], capture_output=True, text=True)
        assert switch.stdout.count("rate 200Mbit") == 3
        assert links() == before
    assert links() == before


SENDING = """
import os, socket, sys, time
size = 5_000_000
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 1234)) as server:
        connection, _ = server.accept()
        begin, count = time.perf_counter(), 0
        while data := connection.recv(1_000_000):
            count += len(data)
        print(count, time.perf_counter() - begin)
else:
    while True:
        try:
            connection = socket.create_connection(("10.0.0.1", 1234))
            break
        except OSError:
            time.sleep(0.01)
    connection.sendall(bytes(size))
    connection.close()
"""


@possible
def test_bytes_do_not_pass_faster_than_the_rate():
    with namespaces.Nodes(2, mb_per_s=10) as nodes:
        count, seconds = nodes.run([sys.executable, "-c", SENDING])[0].split()
    assert int(count) == 5_000_000
    assert float(seconds) > 0.45  # 0.5 s, less what the link may send at once, and what came before the clock ran


@possible
def test_when_one_node_fails_the_others_are_ended_and_it_is_named(nodes):
    with pytest.raises(namespaces.NodeFailed, match=r"node 1: expected .*, found exit code 3; [^$]*it is broken"):
        nodes.run(["sh", "-c", "readlink /proc/self/ns/pid; [ $RANK = 0 ] && sleep 1000; echo it is broken; exit 3"])
    assert nodes.run(["echo", "fine"]) == ["fine\n"] * 2


@possible
def test_what_takes_too_long_is_ended_with_all_that_it_has_started(nodes):
    script = "(setsid sleep 1000 &); readlink /proc/self/ns/pid; sleep 1000"
    with pytest.raises(TimeoutError, match="ends within 0.5 s, found it running") as error:
        nodes.run(["sh", "-c", script], timeout=0.5)
    (number,) = {line for line in str(error.value).splitlines() if line.startswith("pid:")}
    assert inside("pid", number) == []


@possible
def test_what_a_command_leaves_running_is_ended_when_it_returns(nodes):
    output, _ = nodes.run(["sh", "-c", "readlink /proc/self/ns/pid; setsid sleep 1000 >&- 2>&- &"])
    assert inside("pid", output.strip()) == []


KILLED = """
import sys, threading
from helpers.simulate import namespaces

with namespaces.Nodes(2) as nodes:
    nodes.run(["sh", "-c", "readlink /proc/self/ns/net /proc/self/ns/pid > $FOLDER/$RANK; sleep 1000"])
"""


@possible
def test_nothing_is_left_when_the_process_is_killed(tmp_path):
    environment = os.environ | {"FOLDER": str(tmp_path), "PYTHONPATH": str(config.PROJECT)}
    process = subprocess.Popen([sys.executable, "-c", KILLED], env=environment)
    seen = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(path.exists() and path.read_text().count("\n") == 2 for path in seen))
        numbers = [path.read_text().split() for path in seen]
        assert all(inside(number.partition(":")[0], number) for each in numbers for number in each)
    finally:
        process.kill()
        process.wait()
    for number in {number for each in numbers for number in each}:
        wait_until(lambda number=number: not inside(number.partition(":")[0], number))
        assert number not in Path("/proc/self/mountinfo").read_text()  # it has no name that would keep it


# ------------------------------------------------------------------------------------------------------ where it is not


def test_a_missing_tool_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(namespaces, "_PATH", str(tmp_path))
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    assert namespaces.why_not() == "Expected the command ip, found none: install Debian's package iproute2."


def test_another_system_is_named(monkeypatch):
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert namespaces.why_not() == "Network namespaces are a part of Linux, found darwin."


@possible
@pytest.mark.parametrize("tool", ["unshare", "nsenter", "ip", "tc"])
def test_what_a_tool_says_when_it_is_not_allowed_is_the_reason(monkeypatch, tmp_path, tool):
    refusing = tmp_path / tool
    refusing.write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(namespaces, "_PATH", f"{tmp_path}{os.pathsep}{namespaces._PATH}")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    before = set(os.listdir("/proc/self/fd"))
    assert "found: Operation not permitted." in namespaces.why_not()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("count", "mb_per_s"), [(1, 125), (251, 125), (2, 0)])
def test_a_network_that_cannot_exist_is_refused(count, mb_per_s):
    with pytest.raises(ValueError, match="2 to 250 nodes and a bandwidth above 0 MB/s"):
        namespaces.Nodes(count, mb_per_s)


# ------------------------------------------------------------------------------------------ the simulated link and this

HELLO = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g} {sys.argv[1]} {os.environ['NODE']}")
dist.destroy_process_group()
"""


@possible
def test_torchrun_runs_on_the_nodes_as_on_machines(nodes, tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    outputs = nodes.torchrun(script, "argument", ranks=2, env={"NODE": "variable"}, timeout=200)
    lines = sorted(line for output in outputs for line in output.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4: 10 argument variable" for rank in range(4)]
    assert all(output.count("of 4: 10") == 2 for output in outputs)


# Two jobs take turns, round by round, so that what else the machine does meanwhile meets both alike
SAME_JOB = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from helpers import simulate, timing

mine, other, rounds, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
dist.init_process_group("gloo")
rank = dist.get_rank()
# A frame of 1,514 bytes carries 1,448: what is left of the link's rate. From node to node it takes 0.05 ms
network = simulate.SlowNetwork(RATE * 1448 / 1514, latency_ms=0.05)


def variant(megabytes):
    model = nn.Sequential(*[simulate.SleepingLayer(2, 16, 32) for _ in range(6)])
    model = DistributedDataParallel(model, bucket_cap_mb=megabytes)
    if mine == "simulated":
        model.register_comm_hook(None, network.hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()

    return step


def recorded(step, where):
    handler = tensorboard_trace_handler(str(where), worker_name=f"rank_{rank}")
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=4),
                 on_trace_ready=handler, record_shapes=True) as profiler:
        for _ in range(5):
            step()
            profiler.step()


variants = {f"{megabytes} MB": variant(megabytes) for megabytes in (3, 25)}
for step in variants.values():
    for _ in range(2):
        step()
for number in range(rounds):
    dist.barrier()
    (folder / f"{mine}-{number}-asks-{rank}").touch()
    while not (folder / f"{mine}-{number}-may").exists():
        time.sleep(0.01)
    where = folder / mine / str(number)
    timing.interleaved_ranks(variants, rounds=1, steps=4, warmup=1, path=where / "times.json")
    for name, step in variants.items():
        recorded(step, where / name)
    dist.barrier()
    (folder / f"{mine}-{number}-done-{rank}").touch()
del variants, step  # what uses the process group is freed first, or its threads go on
dist.destroy_process_group()
"""


def take_turns(folder, rounds, jobs):
    """Let one job run at a time, as soon as both are ready for the round."""

    def wait(what):
        while not all((folder / f"{what}-{rank}").exists() for rank in range(2)):
            for job in jobs.values():
                assert job.poll() in (None, 0), job.communicate()[0]
            time.sleep(0.01)

    for number in range(rounds):
        for name in jobs:
            wait(f"{name}-{number}-asks")
        for name in sorted(jobs, reverse=number % 2):
            (folder / f"{name}-{number}-may").touch()
            wait(f"{name}-{number}-done")


ROUNDS = 5
# 250 Mbit/s: at 1 Gbit/s the kernel needs so much of a core for the packets that a busy machine slows the real link
RATE = 31.25


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """For each kind of link, bucket size and round, the ms of a step, and of them those of exposed communication."""
    folder = tmp_path_factory.mktemp("links")
    script = folder / "job.py"
    script.write_text(SAME_JOB.replace("RATE", str(RATE)))
    real = f"""
import sys
from helpers.simulate import namespaces
with namespaces.Nodes(2, mb_per_s={RATE}) as nodes:
    nodes.run([sys.executable, {str(script)!r}, "real", "simulated", "{ROUNDS}", {str(folder)!r}])
"""
    simulated = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    simulated += [str(script), "simulated", "real", str(ROUNDS), str(folder)]
    common = {"PYTHONPATH": str(config.PROJECT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    jobs = {}
    try:
        for name, command in (("real", ["-c", real]), ("simulated", simulated)):
            jobs[name] = subprocess.Popen(
                [sys.executable, *command], env=os.environ | common, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        take_turns(folder, ROUNDS, jobs)
        for job in jobs.values():
            output = job.communicate(timeout=60)[0]
            assert job.returncode == 0, output
    finally:
        for job in jobs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, 15)
            job.wait()
    found = {}
    for kind in jobs:
        for number in range(ROUNDS):
            where = folder / kind / str(number)
            times = timing.read_comparison(where / "times.json")
            for name in times.names:
                step, exposed = found.setdefault((kind, name), ([], []))
                step.append(times.mean(name).step_ms)
                exposed.append(traces.communication(where / name)["exposed"].mean())
    text = {f"{kind}, {name}": [[round(ms, 1) for ms in each] for each in both] for (kind, name), both in found.items()}
    print(json.dumps(text, indent=1))
    return found


@possible
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["3 MB", "25 MB"])
@pytest.mark.parametrize("what", [0, 1], ids=["step", "exposed communication"])
def test_the_simulated_link_is_like_the_real_one(measured, name, what):
    real, simulated = (measured[kind, name][what] for kind in ("real", "simulated"))
    ratio = statistics.median(mine / other for mine, other in zip(simulated, real, strict=True))
    assert ratio == pytest.approx(1, abs=0.15)
