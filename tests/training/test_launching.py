"""Jobs of small scripts, most without PyTorch, which would take seconds to import; `torchrun` is the real one."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from support import ranks

from helpers.training import launching

pytestmark = pytest.mark.processes
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel ends a process with its parent")
START = "import os, pathlib, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """A mark for all processes of the test, of which none may be left when it has ended."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(ranks.MARK, mark)
    yield mark
    assert [process.cmdline() for process in ranks.processes(mark)] == []


@pytest.fixture
def script(tmp_path):
    """A function that writes a script and returns its path."""

    def write(text):
        path = tmp_path / "job.py"
        path.write_text(START + text, encoding="utf-8")
        return path

    return write


def test_ranks_get_arguments_and_settings_and_their_whole_lines_are_shown_at_once_without_those_of_torchrun(
    script, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("PET_NNODES", "2")  # an option of torchrun, as some clusters set it
    path = script(
        "import stepscope.base.wording, other\n"
        "print(rank, os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'], end=''); time.sleep(0.5)\n"
        "print('', os.environ['ADA'], *sys.argv[1:])\n"
        "while not pathlib.Path(__file__).with_name(str(rank)).exists(): time.sleep(0.02)\n"
        "print('an error', file=sys.stderr)\n"  # only now: it could come between the parts of the line
    )
    path.with_name("other.py").touch()

    class Notebook(io.StringIO):
        def write(self, text):
            if text[:2] in ("0 ", "1 "):  # else the job waits until its time is over
                (tmp_path / text[0]).touch()
            return super().write(text)

    arguments = ["--log", "--r", "x y", "--", "--role=z", 3, "--max-restarts"]
    with contextlib.redirect_stdout(Notebook()) as shown:
        output = launching.torchrun(path, *arguments, env={"ADA": "1815"}, timeout=100)
    printed = [f"{rank} 2 1 1815 --log --r x y -- --role=z 3 --max-restarts" for rank in range(2)]
    assert sorted(output.splitlines()) == [*printed, "an error", "an error"]
    command = f"torchrun --standalone --nproc-per-node=2 {path} --log --r 'x y' -- --role=z 3 --max-restarts"
    assert shown.getvalue() == f"$ {command}\n{output}\n" and capfd.readouterr() == ("", "")


@posix
def test_the_rank_that_failed_first_is_named_also_if_the_others_fail_because_of_it(script, tmp_path):
    # Rank 0 and rank 2 end before torchrun looks again, as DDP does when a connection is lost.
    path = script(
        "first = pathlib.Path(sys.argv[1])\n"
        "if rank == 1:\n    first.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not first.exists(): time.sleep(0.01)\n"
        "raise RuntimeError('[gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:7592')"
    )
    with pytest.raises(launching.JobFailed, match=r"job.py: rank 1 was killed by SIGKILL \(signal 9\)"):
        launching.torchrun(path, tmp_path / "first", ranks=3, timeout=100, quiet=True)


@posix
def test_an_error_is_quoted_and_the_stopped_rank_that_it_waited_for_is_woken_to_end_by_sigterm(
    script, tmp_path, capsys
):
    path = script(
        "import psutil\n"
        "def end(*_):\n    pathlib.Path(sys.argv[1]).touch()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    os.kill(os.getpid(), 15)\n"
        "if rank == 1:\n    signal.signal(15, end)\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    while True: time.sleep(0.01)  # Python may lose a signal that comes just before a single long one\n"
        "agent = psutil.Process().parents()[1]\n"
        "while all(each.status() != psutil.STATUS_STOPPED for each in agent.children(recursive=True)): pass\n"
        "raise RuntimeError('Timed out waiting 1000ms for recv operation to complete')"
    )
    with pytest.raises(launching.JobFailed) as raised:
        launching.torchrun(path, tmp_path / "by SIGTERM", timeout=100, quiet=True)
    first, others, *quoted = str(raised.value).splitlines()
    assert first.startswith(f"{path}: rank 0 exited with 1: RuntimeError: Timed out waiting")
    assert others == "Not ended then: rank 1."
    assert "line 14, in <module>" in "".join(quoted)
    assert (tmp_path / "by SIGTERM").exists()  # SIGKILL, 30 s later, would not have left it
    assert capsys.readouterr().out == ""


@pytest.mark.slow  # so that on a busy machine, too, each rank has begun when the time is over
def test_a_time_out_ends_ranks_and_what_they_started_and_says_where_each_was(script, tmp_path):
    path = script(
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        "if rank == 0:\n    time.sleep(1000)  # as a barrier\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    begin = time.monotonic()
    with pytest.raises(launching.JobFailed, match="within 30 s") as raised:
        launching.torchrun(path, timeout=30, quiet=True)
    assert time.monotonic() - begin < 30 + 10
    if os.name != "nt":
        assert "rank 0 was at job.py, line 5: time.sleep(1000)  # as a barrier; " in str(raised.value)
        assert "rank 1 was stopped by a signal, and was at job.py, line 7: os.kill(os" in str(raised.value)
    (tmp_path / "run" / "attempt_0" / "0").mkdir(parents=True)  # as torchrun leaves it before it starts a rank
    assert "no rank had begun" in launching._reason(launching._LATE, tmp_path, path, 30)


@posix
@pytest.mark.slow  # so that on a busy machine, too, torchrun sees the failure; it gives the other rank 30 s to end
def test_a_rank_that_failed_is_named_also_if_another_does_not_end_before_the_time_is_over(script, tmp_path):
    path = script(
        "ignores = pathlib.Path(sys.argv[1], 'ignores')\n"
        "if rank == 1:\n    while not ignores.exists():\n        time.sleep(0.01)\n    sys.exit('no images')\n"
        "signal.signal(15, signal.SIG_IGN)\nignores.touch()\ntime.sleep(1000)"
    )
    with pytest.raises(launching.JobFailed, match=r"rank 0 was at job.*; rank 1 exited with 1: no images"):
        launching.torchrun(path, tmp_path, timeout=25, quiet=True)


@posix
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_when_the_notebook_is_interrupted_or_killed_the_job_ends_and_leaves_no_files(
    script, tmp_path, mark, monkeypatch, name
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = script("(pathlib.Path(sys.argv[1]) / str(rank)).touch()\ntime.sleep(1000)")
    code = f"import launching; launching.torchrun({str(path)!r}, {str(tmp_path)!r})"  # without helpers, thus PyTorch
    options = {"cwd": Path(launching.__file__).parent, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **options) as notebook:
        ranks.wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        assert list(tmp_path.glob("torchrun-*"))
        notebook.send_signal(getattr(signal, name))
        assert (b"KeyboardInterrupt" in notebook.stderr.read()) == (name == "SIGINT")
    ranks.wait_until(lambda: not ranks.processes(mark))
    ranks.wait_until(lambda: not list(tmp_path.glob("torchrun-*")))


@posix
@pytest.mark.parametrize("killed", ["torchrun", pytest.param("the watcher", marks=[linux, pytest.mark.slow])])
def test_when_somebody_kills_what_holds_the_job_together_it_ends_and_this_is_said(script, killed):
    path = script(
        "import psutil\n"
        "agent = psutil.Process().parents()[1]\n"
        "(agent if sys.argv[1] == 'torchrun' else agent.parent()).kill()\n"
        "time.sleep(1000)"
    )
    with pytest.raises(launching.JobFailed, match="torchrun itself was killed by SIGKILL"):
        launching.torchrun(path, killed, ranks=1, timeout=100, quiet=True)


def test_what_torchrun_itself_wrote_is_quoted_when_it_fails_before_it_starts_a_rank(script):
    with pytest.raises(launching.JobFailed, match=r"torchrun itself exited with 1\..*\n(.*\n)+AssertionError"):
        launching.torchrun(script(""), ranks=0, timeout=100, quiet=True)


RESTARTED = """
import torch, torch.distributed as dist

attempt, first = os.environ["TORCHELASTIC_RESTART_COUNT"], pathlib.Path(sys.argv[1], "first")
print("attempt", attempt)
if attempt == "2":  # rank 0 is first: it must not take the old address of rank 1
    if rank == 0:
        first.touch()
    while not first.exists():
        time.sleep(0.02)
    time.sleep(3 * rank)
dist.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
print("ranks", int(ranks))
dist.destroy_process_group()  # else its threads abort a rank that exits
if attempt != "2":
    sys.exit("no more") if rank == 1 else time.sleep(1000)
"""


@pytest.mark.slow  # six processes import PyTorch
def test_all_ranks_start_again_as_often_as_is_said_and_find_each_other_and_the_reason_is_shown(
    script, tmp_path, capsys
):
    path = script(RESTARTED)
    output = launching.torchrun(path, tmp_path, max_restarts=2, timeout=200)
    lines = output.splitlines()
    again = [lines.index(f"All ranks start again ({number} of 2).") for number in (1, 2)]
    assert again[0] < again[1] and {lines[number - 1] for number in again} == {"rank 1 exited with 1: no more"}
    assert [lines.count(line) for line in ("attempt 0", "attempt 1", "attempt 2", "ranks 2")] == [2, 2, 2, 6]
    assert "--max-restarts=2" in capsys.readouterr().out.splitlines()[0]
