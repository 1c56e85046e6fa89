"""Runs a function in a fork of this process, so that this process does not change."""

from __future__ import annotations

import os
import pickle
import select
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

from stepscope import thresholds
from stepscope.base.wording import counted

FORKS = hasattr(os, "fork") and sys.platform != "darwin"
"""Whether a process with threads can be forked. On macOS it may crash then: system libraries start threads there (see
"Contexts and start methods" in the documentation of multiprocessing)."""

Result = TypeVar("Result")


class NoResult(RuntimeError):
    """The child process returned nothing. The message says why, as the end of a sentence."""


def call(function: Callable[[], Result]) -> Result:
    """Call a function in a child process, and return its result; raises NoResult if there is none in time."""
    if not FORKS:
        raise NoResult("this system cannot fork safely, and loading items in this process would change the script.")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads, but the child uses none of them
        process = os.fork()
    if not process:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(thresholds.ITEMS_LIMIT_S)
            os.setpgid(0, 0)
            with os.fdopen(_separate(writing), "wb") as file:
                pickle.dump(function(), file)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        content, status = _read(reading, process)
    finally:
        os.close(reading)
        with suppress(OSError):
            os.killpg(process, signal.SIGKILL)  # the child, and all processes that the dataset started in it
    if content:
        return pickle.loads(content)  # type: ignore[no-any-return]
    late = os.waitstatus_to_exitcode(status) == -signal.SIGALRM
    limit = counted(thresholds.ITEMS_LIMIT_S, "second")
    raise NoResult(f"loading items took more than {limit}." if late else "the process that loaded items died.")


def _read(file: int, process: int) -> tuple[bytes, int]:
    """Return a child's output and status once it ends: processes that the child started may keep the file open."""
    content, status, ended, poll = list[bytes](), 0, 0, select.poll()
    poll.register(file, select.POLLIN)
    while True:
        if poll.poll(0 if ended else 50) and (part := os.read(file, 1 << 20)):
            content.append(part)
        elif ended:
            return b"".join(content), status
        else:
            with suppress(ChildProcessError):  # the script ignores SIGCHLD: the system has reaped the child
                ended, status = os.waitpid(process, os.WNOHANG)
                continue
            ended = process


def _separate(keep: int) -> int:
    """Reopen the files of this process, a fork, and replace its pipes and sockets by the null device.

    Otherwise the parent would miss the bytes that this process reads. File `keep` stays open, as the returned file.
    """
    import fcntl  # here: Windows has neither fcntl nor fork

    keep = fcntl.fcntl(keep, fcntl.F_DUPFD, 3)  # the script may have closed its standard output
    for file in psutil.Process().open_files():
        with suppress(OSError):
            access = fcntl.fcntl(file.fd, fcntl.F_GETFL)
            if access & os.O_ACCMODE != os.O_WRONLY:
                again = os.open(file.path, access)
                os.lseek(again, os.lseek(file.fd, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, file.fd)
    empty = os.open(os.devnull, os.O_RDWR)
    for printing in (1, 2):
        os.dup2(empty, printing)
    for shared in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            mode = os.fstat(shared).st_mode
            if shared not in (1, 2, keep) and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.dup2(empty, shared)
    return keep
