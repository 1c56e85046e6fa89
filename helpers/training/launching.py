"""Jobs of several processes: runs `torchrun` from a notebook, always ends the whole job, and names its failures.

This file also runs as the process between the notebook and ``torchrun``, which ends the job when the notebook ends.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from stepscope.base import child

_DUMP, _GRACE = 10.0, 30.0  # seconds for ranks to write where they are, and to end
_LATE = 124  # the exit code of `timeout` in a shell
_SHOWN = 12  # lines of a rank's errors, or of torchrun's, in an error
_FOLDER = "PET_LOG_DIR"  # torchrun's --log-dir; all processes of a job inherit it, which is how `_end` finds them
# Without it (torch 2.5 to 2.15) ranks that start again share a store with earlier ranks, and the first ones take old
# addresses for the new ones: "Connection refused", https://github.com/pytorch/pytorch/issues/135712.
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# What torchrun writes: before a line of a rank, as `_environment` sets it; before it ends the other ranks by SIGTERM;
# after that; when it kills a rank that ignores SIGTERM; and at the end
_RANK = re.compile("\x02([0-9]+)\x03")
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_SEEN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_FORCED = re.compile(r"Unable to shutdown process (\d+)")
_SUMMARY = re.compile(r"rank +: (\d+) \(.*\n *exitcode +: (-?\d+) \(pid: (\d+)\)")
_STOPPED = re.compile(r"Stopped when the time was over: rank (\d+)")  # `_abort` writes it
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')  # as faulthandler writes it
# What a rank writes when another has gone (gloo on Linux and macOS, and on Windows; NCCL), or does not come
_LOST = re.compile(r"Connection (closed|reset) by|Broken pipe|forcibly closed|remote process exited")
_WAITED = re.compile(r"Timed out|timeout", re.IGNORECASE)


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
    with tempfile.TemporaryDirectory(prefix="torchrun-", ignore_cleanup_errors=True) as folder:
        environment = _environment(folder) | (_OWN_STORE if max_restarts else {}) | dict(env or {})
        # "--": or Python up to 3.11 may take an option of the script for an abbreviated one of torchrun
        command = [__file__, timeout, folder, *options, "--", *words]
        code, lines, log = _run(command, Path(folder), environment, max_restarts, show)
        if code:
            raise JobFailed(f"{script}: {_reason(script, code, log, Path(folder), timeout)}")
    return "\n".join(lines)


def _environment(folder: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}  # options of torchrun
    usual = {"linux": {"GLOO_SOCKET_IFNAME": "lo"}, "darwin": {"GLOO_SOCKET_IFNAME": "lo0"}}.get(sys.platform, {})
    fixed = {
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), own.get("PYTHONPATH")])),
        "PYTHONFAULTHANDLER": "1",  # a rank writes where it is when it is aborted, see `_abort`
        "USE_LIBUV": "0" if os.name == "nt" else "1",  # PyTorch for Windows is built without
        "PET_LOCAL_ADDR": "127.0.0.1",  # the machine's own name may lead nowhere
        "PET_TEE": "3",  # the output of each rank into files of its own, too
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "\x02${rank}\x03",
        _FOLDER: folder,
    }
    return usual | own | fixed


def _run(
    command: list[object], folder: Path, environment: dict[str, str], max_restarts: int, show: Callable[[str], None]
) -> tuple[int, list[str], str]:
    """Run ``torchrun``, and return its exit code, the lines that the ranks printed, and what it wrote itself."""
    watcher = child.Child(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines, log, begun, restarts = [], "", {}, 0

    def say(line: str) -> None:
        lines.append(line)
        show(line)

    try:
        for line in io.TextIOWrapper(watcher.process.stdout, encoding="utf-8", errors="replace"):
            own, *marked = _RANK.split(line)
            log += own
            if closing := _CLOSING.search(own):
                _wake(int(closing[1]))
            if (seen := _SEEN.search(own)) and restarts < max_restarts:
                restarts += 1
                became = _became([(int(seen[2]), int(seen[1]))], folder).splitlines()[0]
                say(f"{became}\nAll ranks start again ({restarts} of {max_restarts}).")
            for rank, text in zip(marked[::2], marked[1::2], strict=True):  # a line may come in several parts
                begun[rank] = begun.get(rank, "") + text
                if text.endswith("\n"):
                    say(begun.pop(rank)[:-1])
        for text in begun.values():
            say(text)
        return watcher.process.wait(), lines, log
    finally:
        watcher.stop(_GRACE)
        _end(folder)  # what torchrun has left, also if somebody killed the watcher


def _reason(script: Path, code: int, log: str, folder: Path, timeout: float) -> str:
    if code == _LATE:
        errors = {rank.name: _errors(rank) for rank in _ranks(folder)}
        stopped = dict.fromkeys(_STOPPED.findall(log), "was stopped by a signal, and ")
        places = "; ".join(
            f"rank {rank} {stopped.get(rank, '')}{_place(text, script)}" for rank, text in errors.items()
        )
        failed = {rank: _traceback(text)[0] for rank, text in errors.items() if "Fatal Python error" not in text}
        if _CLOSING.search(log) and 0 < len(failed) < len(errors):  # torchrun gives the others 30 s to end
            first = "; ".join(f"rank {rank} failed: {last or 'it wrote no error'}" for rank, last in failed.items())
            return f"{first}. After that others had not ended when the {timeout:g} s were over: {places}."
        return (
            f"expected its end within {timeout:g} s, and ended it then: {places or 'no rank had begun'}. Ranks wait "
            "forever if another one leaves out a collective; if they all just need longer, give them more time."
        )
    killed = set(_FORCED.findall(log))
    failures = [
        (int(rank), -signal.SIGTERM if pid in killed else int(exit_code))
        for rank, exit_code, pid in _SUMMARY.findall(log)
    ]
    if failures:
        return _became(failures, folder)
    end = "\n".join(log.splitlines()[-_SHOWN:])
    return f"torchrun itself {_ended(128 - code if code > 128 else code)}. Its last output:\n{end}"


def _became(failures: list[tuple[int, int]], folder: Path) -> str:
    """Return in words how the rank that failed first ended, of those with these exit codes.

    Others fail because of it: they lose their connection, or ``torchrun`` ends them by SIGTERM.
    """
    ranks = _ranks(folder)
    errors = {rank: _traceback(_errors(ranks[rank])) for rank, _ in failures}

    def order(failure: tuple[int, int]) -> tuple:
        rank, code = failure
        written = (ranks[rank] / "stderr.log").stat().st_mtime_ns
        # a rank that SIGKILL ends writes nothing then; others write their errors when they end, also at other signals
        return bool(_LOST.search(errors[rank][0])), code == -signal.SIGTERM, code != -9, written

    rank, code = min(failures, key=order)
    became, (last, shown) = f"rank {rank} {_ended(code)}", errors[rank]
    if code == -9:
        return f"{became}, as the system does when memory runs out, or as anybody may."
    if not last:
        return f"{became}, and wrote no error."
    ended = [str(other) for other in range(len(ranks)) if other not in errors]
    busy = [str(other) for other, code in failures if code == -signal.SIGTERM and other != rank]
    others = ""
    if ended and _LOST.search(last):
        others = f"\nEnded before, without an error: rank {', '.join(ended)}. With fewer steps than the others?"
    if busy and _WAITED.search(last):
        others = f"\nNot ended, when the wait for it was over: rank {', '.join(busy)}."
    return f"{became}: {last}{others}\nThe end of its errors:\n{shown}"


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name} (signal {-code})"


def _ranks(folder: Path) -> list[Path]:
    """Return the folder of each rank that has begun in the last attempt; one has `stdout.log` and `stderr.log`."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    begun = (path.parent for path in attempts[-1].glob("*/stderr.log")) if attempts else ()
    return sorted(begun, key=lambda path: int(path.name))


def _errors(rank: Path) -> str:
    """Return what a rank wrote to standard error, without the marks that PyTorch puts before each line."""
    text = (rank / "stderr.log").read_text(encoding="utf-8", errors="replace")
    return re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)


def _traceback(errors: str) -> tuple[str, str]:
    """Return the line with the error, or the last one if there is no traceback, and the last lines up to it.

    Of several tracebacks the last counts: a `DataLoader` quotes its worker's at the end of its own.
    """
    own = errors.partition("Fatal Python error")[0]  # the rest is faulthandler's output from a killed rank
    lines = [line for line in own.splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    if begins:
        ends = (number for number in range(begins[-1] + 1, len(lines)) if not lines[number].startswith(" "))
        lines = lines[begins[-1] : next(ends, len(lines)) + 1]
    return "".join(lines[-1:]), "\n".join(lines[-_SHOWN:])


def _place(errors: str, script: Path) -> str:
    """Return in words where a rank was when it was aborted, from faulthandler's output."""
    main = errors.rpartition("(most recent call first):\n")[2]  # the main thread is the last
    frames = _FRAME.findall(main)
    if not frames:
        return "had ended, or did not say where it was"
    file, line = next((frame for frame in frames if Path(frame[0]).name == script.name), frames[0])
    return f"was at {Path(file).name}, line {line}: {linecache.getline(file, int(line)).strip()}"


def _wake(rank: int) -> None:
    """Resume a process if it is stopped: otherwise SIGTERM does not end it, and torchrun waits 30 s for that."""
    with suppress(psutil.Error):
        process = psutil.Process(rank)
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()


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


def _watch(timeout: str, folder: str, *words: str) -> int:
    """Run ``torchrun`` until it ends, its time is over, or the notebook that started this process ends or asks."""
    child.end_with_owner(lambda: _end(folder), folder)
    signal.signal(signal.SIGINT, lambda *_: None)  # on Windows torchrun sends it to ranks, and to all in its console
    command = [sys.executable, "-P", "-u", "-m", "torch.distributed.run", *words]
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=child.kernel_ends_with_parent())
    try:
        code = agent.wait(float(timeout))
    except subprocess.TimeoutExpired:
        _abort(agent)
        return _LATE
    return code if code >= 0 else 128 - code


def _abort(agent: subprocess.Popen) -> None:
    """End ``torchrun``, and let each rank write where it is: Python's faulthandler does so when it is aborted."""
    ranks = psutil.Process(agent.pid).children()
    agent.kill()
    if os.name != "nt":
        for rank in ranks:
            with suppress(psutil.Error):
                if rank.status() == psutil.STATUS_STOPPED:
                    print(f"Stopped when the time was over: rank {rank.environ()['RANK']}", flush=True)
                rank.send_signal(signal.SIGABRT)
                rank.resume()  # a stopped rank does not abort
        psutil.wait_procs(ranks, _DUMP)


if __name__ == "__main__":
    if os.name != "nt":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an aborted rank leaves no core behind
    sys.exit(_watch(*sys.argv[1:]))
