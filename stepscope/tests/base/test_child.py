"""A child process ends with its owner, and leaves neither processes nor files."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from support import ranks

from stepscope.base.child import Child

pytestmark = pytest.mark.processes

# Starts a process of its own, and prints both numbers
CHILD = """
import os, subprocess, sys
from stepscope.base import child

thread = child.end_with_owner(lambda: open(sys.argv[2], "w").close(), folder=sys.argv[1])
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdin=subprocess.DEVNULL)
print(os.getpid(), below.pid, flush=True)
while True:
    thread.join(0.05)  # Python may lose a signal that comes just before a single long wait
"""
OWNER = """
import os, subprocess, sys, time
from stepscope.base.child import Child

child = Child(sys.argv[1:], stdout=subprocess.PIPE)
numbers = child.process.stdout.readline().decode().split()
fork = os.fork()  # as a DataLoader's worker is: it has the pipe, too
if fork == 0:
    child.stop()  # which is not for a fork to do
    time.sleep(1000)
print(*numbers, fork, flush=True)
time.sleep(1000)
"""
# A thread of it forks all the time
FORKING = """
import os, threading, time
from stepscope.base import child

def fork():
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        time.sleep(0.002)

thread = child.end_with_owner()
threading.Thread(target=fork, daemon=True).start()
thread.join()
"""


@pytest.fixture
def arguments(tmp_path):
    """Of a child with a folder, which makes the file "cleaned" at its end."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    return [tmp_path / "child.py", tmp_path / "folder", tmp_path / "cleaned"]


def ended(numbers, tmp_path):
    """Whether processes are gone, or will be at once, and the folder with them."""
    ranks.wait_until(lambda: not any(map(psutil.pid_exists, numbers)))
    return not (tmp_path / "folder").exists() and (tmp_path / "cleaned").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_and_its_processes_end_with_a_killed_owner_though_a_fork_lives(arguments, tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    child, below, fork = map(int, owner.stdout.readline().split())
    try:
        assert all(map(psutil.pid_exists, (child, below, fork)))  # the fork has stopped nothing
        owner.kill()
        owner.wait()
        assert ended([child, below], tmp_path)
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        owner.stdout.close()


def drop(child):
    child.process.stdout.close()
    vars(child).clear()


@pytest.mark.parametrize("end", [Child.stop, drop, lambda child: child.process.terminate()])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # one that was dropped
def test_a_child_ends_when_it_is_stopped_dropped_or_terminated(arguments, tmp_path, end):
    child = Child(arguments, stdout=subprocess.PIPE)
    process, numbers = child.process, [int(number) for number in child.process.stdout.readline().split()]
    end(child)
    process.wait(60)
    assert ended(numbers, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_that_a_thread_forks_while_the_child_ends_also_ends(tmp_path):
    mark = str(tmp_path)
    child = Child(["-c", FORKING], env=os.environ | {ranks.MARK: mark})
    ranks.wait_until(lambda: len(ranks.processes(mark)) > 20)
    assert child.stop()
    ranks.wait_until(lambda: not ranks.processes(mark))


def test_a_child_that_does_not_end_by_itself_is_killed():
    child = Child(["-c", "import time; print(flush=True); time.sleep(1000)"], stdout=subprocess.PIPE)
    child.process.stdout.readline()
    assert child.stop(patience=0.1) and not child.runs
