import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from support.processes import forked
from support.ranks import wait_until

from helpers.simulate import namespaces

pytestmark = pytest.mark.processes
needs_namespaces = pytest.mark.usefixtures("possible")
SHOWN = "readlink /proc/self/ns/net /proc/self/ns/pid; "


@pytest.fixture(scope="module")
def possible():
    if refused := namespaces.why_not():
        pytest.skip(refused)


def inside(number):
    """The processes in a namespace, such as "net:[4026531840]"; those of other users left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "ns" / number.partition(":")[0]).readlink()) == number:
                found.append(int(process.name))
    return found


@needs_namespaces
def test_each_node_has_a_limited_network_of_its_own_and_the_same_files(tmp_path):
    before = sorted(path.name for path in Path("/sys/class/net").iterdir())
    (tmp_path / "file").write_text("the same\n")
    script = f"{SHOWN} echo rank $RANK of $WORLD_SIZE; cat {tmp_path}/file; tc qdisc show dev eth0"
    output = namespaces.run(["sh", "-c", script], 25)
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(output.splitlines())
    assert output.count("the same\n") == len(re.findall("tbf.* rate 200Mbit", output)) == 2
    assert len({*re.findall(r"net:\[\d+\]", output), str(Path("/proc/self/ns/net").readlink())}) == 3
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == before


@needs_namespaces
def test_when_a_node_fails_or_takes_too_long_all_that_was_started_is_ended():
    with pytest.raises(RuntimeError, match="exit code 3(.*\n)*it is broken") as failed:
        namespaces.run(["sh", "-c", f"{SHOWN} [ $RANK = 0 ] && sleep 1000; echo it is broken; exit 3"])
    for seconds in (1, 4, 16, 64):  # a busy machine may have started nothing by then
        with pytest.raises(subprocess.TimeoutExpired) as late:
            namespaces.run(["sh", "-c", f"(setsid sleep 1000 &); {SHOWN} sleep 1000"], timeout=seconds)
        if late.value.stdout:
            break
    numbers = {*re.findall(r"\w+:\[\d+\]", f"{failed.value}\n{late.value.stdout.decode()}")}
    assert sum(number.startswith("pid:") for number in numbers) == 2
    for number in numbers:
        wait_until(lambda number=number: not inside(number))


@needs_namespaces
def test_nothing_is_left_when_the_process_is_killed(tmp_path):
    process = forked(namespaces.run, ["sh", "-c", f"({SHOWN}) > {tmp_path}/$RANK; sleep 1000"])
    seen = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(path.exists() and path.read_text().count("\n") == 2 for path in seen))
        numbers = [number for path in seen for number in path.read_text().split()]
        assert all(map(inside, numbers))
    finally:
        process.kill()
        process.join()
    for number in numbers:
        wait_until(lambda number=number: not inside(number))


def test_a_missing_tool_is_named_with_its_package_and_another_system_too(monkeypatch, tmp_path):
    monkeypatch.setattr(namespaces, "_PATH", str(tmp_path))
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    assert "iproute2" in namespaces.why_not()
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "darwin" in namespaces.why_not()


@needs_namespaces
def test_what_a_tool_says_when_it_is_not_allowed_is_the_reason(monkeypatch, tmp_path):
    refusing = tmp_path / "tc"
    refusing.write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(namespaces, "_PATH", f"{tmp_path}{os.pathsep}{namespaces._PATH}")
    assert "Operation not permitted" in namespaces.why_not()
