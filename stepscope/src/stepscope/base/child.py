"""A child process that ends with its owner: when the owner stops it, drops it, or ends, however that happens.

The child notices by a pipe, and on POSIX also by its parent's number: forks of the owner, such as the workers of a
DataLoader, inherit the pipe and may hold it longer. It runs in a session of its own, without the owner's interrupts.
"""

from __future__ import annotations

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

_OWNER = "STEPSCOPE_OWNER"  # the variable with the number of the process that started a child
_POLL = 0.2  # seconds between two looks whether the owner is still there
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Child:
    """A Python process that ends with this one; it must call `end_with_owner`.

    Parameters
    ----------
    arguments : sequence
        Of Python: a script or ``-m`` and a module, and what they are given.
    env : mapping, optional
        Environment variables, instead of those of this process.
    **options
        Of `subprocess.Popen`: `cwd`, `stdout`, `stderr`.

    Its process is the attribute `process`, a `subprocess.Popen`.
    """

    def __init__(self, arguments: Sequence[object], env: Mapping[str, str] | None = None, **options):
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", *map(str, arguments)],
            env=dict(os.environ if env is None else env) | {_OWNER: str(self._owner)},
            bufsize=0,
            stdin=subprocess.PIPE,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            start_new_session=True,
            **options,
        )
        # It closes with this object; that of Popen would stay open
        self._pipe, self.process.stdin = self.process.stdin, None

    @property
    def runs(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def stop(self, patience: float = 30) -> bool:
        """End the process, by SIGKILL after `patience` seconds, and return True; do nothing in a fork of its owner."""
        if os.getpid() != self._owner:
            return False
        if not self._pipe.closed:
            with self._pipe, suppress(OSError):
                self._pipe.write(b"\n")  # to close it would not do: a fork may have it open
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return True


def end_with_owner(clean: Callable[[], object] = lambda: None, folder: str | Path | None = None) -> threading.Thread:
    """Let this process, a `Child`, end with its owner, or by SIGTERM, and all processes that it has started with it.

    Call it in the main thread, once.

    Parameters
    ----------
    clean : callable
        Called first, in another thread.
    folder : path, optional
        Removed at last.

    Returns
    -------
    Thread
        It ends with this process: join it if there is nothing else to do.
    """
    owner, asked, ending = int(os.environ.pop(_OWNER)), threading.Event(), threading.Event()

    def wait_and_end() -> None:
        if os.name == "nt":  # no fork can hold the pipe there, and nothing can wait for it and look around meanwhile
            os.read(0, 1)
        else:
            while os.getppid() == owner and not asked.is_set() and not select.select([0], [], [], _POLL)[0]:
                pass
        ending.set()
        try:
            clean()
            import psutil  # here, because a child starts without what takes time

            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            if os.name != "nt" and os.getpgrp() == os.getpid():  # with whatever another thread has forked meanwhile
                os.killpg(0, signal.SIGKILL)
            os._exit(0)  # other threads may wait for what never comes

    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    thread = threading.Thread(target=wait_and_end, daemon=True)
    thread.start()
    atexit.register(lambda: thread.join() if ending.is_set() else None)  # the main thread must not cut the end short
    return thread


def kernel_ends_with_parent() -> Callable[[], object] | None:
    """Return a `preexec_fn` by which Linux kills a process with the thread that started it; elsewhere None."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
