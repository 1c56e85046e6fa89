"""Jobs of several processes: runs `torchrun` from a notebook, always ends the whole job, and names its failures.

This file also runs as two kinds of processes of a job. One is between the notebook and ``torchrun``, and ends the job
when the notebook ends. The other is, for each rank, between ``torchrun`` and the script: it passes on the lines that
the script writes, and keeps its errors and its exit code in the folder of the rank.
"""

import io
import linecache
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from stepscope.base import child

_LOOK = 0.05  # seconds between two looks at what a script has written
_DUMP, _GRACE = 10.0, 30.0  # seconds for ranks to write where they are, and to end
_LATE = 124  # the exit code of `timeout` in a shell
_SHOWN = 12  # lines of a rank's errors, or of torchrun's, in an error
_FOLDER = "PET_LOG_DIR"  # torchrun's --log-dir; all processes of a job inherit it, which is how `_end` finds them
_LOG = "torchrun.log"  # in this folder: what torchrun itself writes
_OUTPUT, _ERRORS, _CODE, _STOPPED = "stdout.log", "stderr.log", "exit-code", "stopped"  # in the folder of a rank
_BY_TORCHRUN = (-signal.SIGTERM, None)  # exit codes of ranks that torchrun ends, the second 30 s later by SIGKILL
# Without it (torch 2.5 to 2.15) ranks that start again share a store with earlier ranks, and the first ones take old
# addresses for the new ones: "Connection refused", https://github.com/pytorch/pytorch/issues/135712.
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')  # as faulthandler writes it


class JobFailed(RuntimeError):
    """A job of several processes failed, or did not end; the message names the rank, and how it ended."""


def torchrun(
    script: str | Path,
    *arguments: object,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    quiet: bool = False,
    max_restarts: int = 0,
) -> str:
    """Run a script in several processes of this machine by ``torchrun``, and return all that the ranks print.

    The command is printed as one would type it, and the ranks' output as it comes, without that of ``torchrun`` itself.
    Each rank has one thread, can import `helpers`, and talks to the others on this machine only. When this returns or
    raises, and when this process ends in any way, no process of the job is left. Raises `FileNotFoundError` if there is
    no such script; `JobFailed` if a rank failed, with no restart left, or if the time was over.

    Parameters
    ----------
    script, *arguments
        The script and its arguments, each a word.
    ranks : int
        Processes; for NCCL not more than there are GPUs.
    env : mapping of str to str, optional
        Environment variables for the ranks, beside those of this process.
    timeout : float
        Seconds for the whole job; then it is ended.
    quiet : bool
        Whether nothing is printed.
    max_restarts : int
        How often ``torchrun`` may start all ranks again after one has failed.
    """
    script = Path(script)
    if not script.is_file():
        raise FileNotFoundError(f"Expected a script at {script.absolute()}, found none.")
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    if max_restarts:
        options.append(f"--max-restarts={max_restarts}")
    words = [str(word) for word in (script, *arguments)]
    show = (lambda line: None) if quiet else (lambda line: print(line, flush=True))
    show(f"$ torchrun {shlex.join([*options, *words])}")
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="torchrun-", ignore_cleanup_errors=True) as folder:
        environment = _environment(folder) | (_OWN_STORE if max_restarts else {}) | dict(env or {})
        # "--": or Python up to 3.11 may take an option of the script for an abbreviated one of torchrun
        command = [__file__, "job", timeout, folder, *options, "--", __file__, "rank", *words]
        with open(Path(folder, _LOG), "wb") as log:
            job = child.Child(command, environment, stdout=subprocess.PIPE, stderr=log)
        try:
            assert job.process.stdout is not None  # it is a pipe
            for line in io.TextIOWrapper(job.process.stdout, encoding="utf-8", errors="replace"):
                lines.append(line.removesuffix("\n"))
                show(lines[-1])
            code = job.process.wait()
        finally:
            job.stop(_GRACE)
            _end(folder)  # what torchrun has left, also if somebody killed the process between
        if code:
            raise JobFailed(f"{script}: {_reason(code, Path(folder), script, timeout)}")
    return "\n".join(lines)


def _environment(folder: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}  # options of torchrun
    usual = {"linux": {"GLOO_SOCKET_IFNAME": "lo"}, "darwin": {"GLOO_SOCKET_IFNAME": "lo0"}}.get(sys.platform, {})
    fixed = {
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), own.get("PYTHONPATH")])),
        "PYTHONFAULTHANDLER": "1",  # a script writes where it is when it is aborted, see `_run_rank`
        "USE_LIBUV": "0" if os.name == "nt" else "1",  # PyTorch for Windows is built without
        "PET_LOCAL_ADDR": "127.0.0.1",  # the machine's own name may lead nowhere
        _FOLDER: folder,
    }
    return usual | own | fixed


def _reason(code: int, folder: Path, script: Path, timeout: float) -> str:
    """Return in words why a job failed, from its exit code and what its processes have left in the folder."""
    attempt = max(folder.glob("*/attempt_*"), key=os.path.getmtime, default=folder)
    codes = _codes(attempt)
    if code == _LATE:
        places = "; ".join(f"rank {rank.name} {_place(rank, codes[rank], script)}" for rank in codes)
        return (
            f"expected its end within {timeout:g} s, and ended it then: {places or 'no rank had begun'}. Ranks wait "
            "forever if another one leaves out a collective; if they all just need longer, give them more time."
        )
    if code == 1 and any(codes.values()):
        return _became(attempt)
    log = (folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    ended = _ended(128 - code if code > 128 else code)
    return "\n".join([f"torchrun itself {ended}. Its last output:", *log[-_SHOWN:]])


def _became(attempt: Path) -> str:
    """Return in words how the rank that failed first ended, in an attempt in which at least one failed.

    Others fail because of it: they lose their connection, or ``torchrun`` ends them.
    """
    codes = _codes(attempt)

    def order(rank: Path) -> tuple[bool, int]:
        # A rank that SIGKILL ends writes nothing then, so that it is before those that write because it has gone
        return codes[rank] in _BY_TORCHRUN, (rank / _ERRORS).stat().st_mtime_ns

    first = min((rank for rank in codes if codes[rank] != 0), key=order)
    code, (error, shown) = codes[first] or -9, _error(first)
    became = f"rank {first.name} {_ended(code)}"
    if code == -9:
        return f"{became}, as the system does when memory runs out, or as anybody may."
    if not error:
        return f"{became}, and wrote no error."
    lines = [f"{became}: {error}"]
    if done := [rank.name for rank in codes if codes[rank] == 0]:
        lines.append(f"Ended without an error: rank {', '.join(done)}. With fewer steps than the others?")
    if busy := [rank.name for rank in codes if codes[rank] in _BY_TORCHRUN and rank != first]:
        lines.append(f"Not ended then: rank {', '.join(busy)}.")
    return "\n".join([*lines, f"The end of the errors of rank {first.name}:", shown])


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name} (signal {-code})"


def _codes(attempt: Path) -> dict[Path, int | None]:
    """Return the folder of each rank that has begun in an attempt, and its exit code.

    The code is None as long as the rank runs, and if SIGKILL has ended the script and the process above it.
    """
    ranks = sorted((path.parent for path in attempt.glob(f"*/{_ERRORS}")), key=lambda rank: int(rank.name))
    return {
        rank: int((rank / _CODE).read_text(encoding="utf-8")) if (rank / _CODE).exists() else None for rank in ranks
    }


def _errors(rank: Path) -> str:
    """Return what a script wrote to standard error, without the mark that PyTorch puts before each line."""
    lines = (rank / _ERRORS).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line.removeprefix(f"[rank{rank.name}]:").removeprefix(" ") for line in lines)


def _error(rank: Path) -> tuple[str, str]:
    """Return the line with a rank's error, or its last line if there is no traceback, and the last lines up to it.

    Of several tracebacks the last counts: a `DataLoader` quotes its worker's at the end of its own.
    """
    own = _errors(rank).partition("Fatal Python error")[0]  # the rest is faulthandler's output from a killed rank
    lines = [line for line in own.splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    if begins:
        ends = (number for number in range(begins[-1] + 1, len(lines)) if not lines[number].startswith(" "))
        lines = lines[begins[-1] : next(ends, len(lines)) + 1]
    return "".join(lines[-1:]), "\n".join(lines[-_SHOWN:])


def _place(rank: Path, code: int | None, script: Path) -> str:
    """Return in words where a rank was when it was aborted, from faulthandler's output, or how it had ended."""
    frames = _FRAME.findall(_errors(rank).rpartition("(most recent call first):\n")[2])  # the main thread is the last
    if not frames:
        return "did not say where it was" if code is None else f"{_ended(code)}: {_error(rank)[0]}"
    file, line = next((frame for frame in frames if Path(frame[0]).name == script.name), frames[0])
    stopped = "was stopped by a signal, and " if (rank / _STOPPED).exists() else ""
    return f"{stopped}was at {Path(file).name}, line {line}: {linecache.getline(file, int(line)).strip()}"


def _end(folder: str | Path) -> None:
    """Kill all other processes of a job, also those that have lost their parent, until there is none."""
    for _ in range(3):  # a killed process may just have started another
        processes = [process for process in psutil.process_iter() if _folder_of(process) == str(folder)]
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, _GRACE)


def _folder_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):  # another user's, or just gone
        return process.environ().get(_FOLDER) if process.pid != os.getpid() else None
    return None


def _run_job(timeout: str, folder: str, *words: str) -> int:
    """Run ``torchrun`` until it ends, its time is over, or the notebook that started this process ends or asks."""
    child.end_with_owner(lambda: _end(folder), folder)
    signal.signal(signal.SIGINT, lambda *_: None)  # on Windows torchrun sends it to ranks, and to all in its console
    command = [sys.executable, "-P", "-u", "-m", "torch.distributed.run", *words]
    torchrun = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=child.kernel_ends_with_parent())
    try:
        code = torchrun.wait(float(timeout))
    except subprocess.TimeoutExpired:
        code, ranks = _LATE, psutil.Process(torchrun.pid).children()
        torchrun.kill()
        psutil.wait_procs(ranks, _DUMP)  # each aborts its script
    _end(folder)  # or the notebook would wait for more output
    return code if code >= 0 else 128 - code


def _run_rank(*words: str) -> int:
    """Run a script as a rank, pass on the lines that it writes, keep its exit code, and end it with ``torchrun``."""
    rank, again = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torchrun, shown = os.getppid(), open(1, "wb", closefd=False)
    if again and rank.name == "0":
        became = _became(rank.parent.with_name(f"attempt_{again - 1}")).splitlines()[0]
        most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        shown.write(f"{became}\nAll ranks start again ({again} of {most}).\n".encode())
    logs = [rank / _OUTPUT, rank / _ERRORS]
    with logs[0].open("wb") as output, logs[1].open("wb") as errors:
        command = [sys.executable, "-u", *words]
        script = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    # torchrun sends SIGTERM to this process and to the script, which gets it later if it is stopped
    signal.signal(signal.SIGTERM, lambda *_: script.send_signal(signal.SIGCONT))
    files, begun, code = [log.open("rb") for log in logs], [b"", b""], None
    while code is None:
        time.sleep(_LOOK)
        code = script.poll()
        for number, file in enumerate(files):
            *lines, begun[number] = (begun[number] + file.read()).split(b"\n")
            shown.writelines(line + b"\n" for line in lines)
        shown.flush()
        if os.getppid() != torchrun:
            if psutil.Process(script.pid).status() == psutil.STATUS_STOPPED:
                (rank / _STOPPED).touch()
            script.send_signal(signal.SIGABRT)  # Python's faulthandler then writes where the script is
            script.send_signal(signal.SIGCONT)  # a stopped process does not abort
            code = script.wait(_DUMP)
    shown.writelines(line + b"\n" for line in begun if line)
    shown.flush()
    unfinished = rank / f"{_CODE}.part"  # the file appears with its content: torchrun's end may come at any moment
    unfinished.write_text(str(code), encoding="utf-8")
    unfinished.replace(rank / _CODE)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if os.name != "nt":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an aborted rank leaves no core behind
    sys.exit(_run_job(*sys.argv[2:]) if sys.argv[1] == "job" else _run_rank(*sys.argv[2:]))
