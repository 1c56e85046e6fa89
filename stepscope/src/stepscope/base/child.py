"""A child process that ends with its owner: when the owner stops it, drops its `Child`, or ends in any way.

The child watches a pipe, and on POSIX also its parent's process ID: forks of the owner, such as DataLoader workers,
inherit the pipe and may keep it open longer. The child runs in its own session, without the owner's interrupts.
"""

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_OWNER = "STEPSCOPE_OWNER"  # environment variable with the ID of the process that started a child
_POLL = 0.2  # seconds between two checks whether the owner still exists
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Child:
    """A Python process that ends with this one; it must call `end_with_owner`.

    `arguments` are Python's: a script, or ``-m`` and a module, and their arguments. `env` has environment variables,
    by default those of this process; `options` are `cwd`, `stdout` and `stderr` of `subprocess.Popen`. The process is
    the attribute `process`, a `subprocess.Popen`.
    """

    def __init__(self, arguments: Sequence[object], env: Mapping[str, str] | None = None, **options: Any) -> None:
        self._owner = os.getpid()
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-P", *map(str, arguments)],
            env=dict(os.environ if env is None else env) | {_OWNER: str(self._owner)},
            bufsize=0,
            stdin=subprocess.PIPE,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            start_new_session=True,
            **options,
        )
        assert self.process.stdin is not None  # it is a pipe
        # This pipe closes with this object; Popen's would stay open
        self._pipe, self.process.stdin = self.process.stdin, None

    @property
    def runs(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def stop(self, patience: float = 30) -> bool:
        """End the process, by SIGKILL after `patience` seconds, and return True; do nothing in a fork of its owner."""
        if os.getpid() != self._owner:
            return False
        if not self._pipe.closed:
            with self._pipe, suppress(OSError):
                self._pipe.write(b"\n")  # closing it is not enough: a fork may have it open
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return True


def end_with_owner(clean: Callable[[], object] = lambda: None, folder: str | Path | None = None) -> threading.Thread:
    """Let this process, a `Child`, and all processes that it has started end with its owner, or by SIGTERM.

    Call it once, in the main thread. It returns the thread that waits for the end, and then calls `clean`, kills the
    processes and removes `folder`. A main thread without work should join this thread for a second at a time, since
    Python may lose a signal that comes just before one long wait.
    """
    owner, asked, ending = int(os.environ.pop(_OWNER)), threading.Event(), threading.Event()

    def wait_and_end() -> None:
        if os.name == "nt":  # no fork can hold the pipe there, and select cannot wait for it
            os.read(0, 1)
        else:
            while os.getppid() == owner and not asked.is_set() and not select.select([0], [], [], _POLL)[0]:
                pass
        ending.set()
        try:
            clean()
            import psutil  # here, so that a child starts quickly

            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            if os.name != "nt" and os.getpgrp() == os.getpid():  # with forks that other threads made meanwhile
                os.killpg(0, signal.SIGKILL)
            os._exit(0)  # other threads may wait for ever

    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    thread = threading.Thread(target=wait_and_end, daemon=True)
    thread.start()
    atexit.register(lambda: thread.join() if ending.is_set() else None)  # the main thread must not exit first
    return thread


def kernel_ends_with_parent() -> Callable[[], object] | None:
    """Return a `preexec_fn` by which Linux kills a process with the thread that started it; elsewhere None."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
