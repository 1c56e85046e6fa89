"""Runs a function in a fork of this process, so that this process does not change."""

from __future__ import annotations

import os
import pickle
import select
import signal
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

from stepscope import thresholds
from stepscope.base.wording import counted

Result = TypeVar("Result")


class NoResult(RuntimeError):
    """The other process returned nothing. The message says why, as the end of a sentence."""


def call(function: Callable[[], Result]) -> Result:
    """Return what a function returns in another process; raises NoResult if it returns nothing in time."""
    if not hasattr(os, "fork"):
        raise NoResult("this system has no fork, and loading some here would change the script.")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads, but the other process uses none of them
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
            os.killpg(process, signal.SIGKILL)  # with all that the dataset started there
    if content:
        return pickle.loads(content)  # type: ignore[no-any-return]
    late = os.waitstatus_to_exitcode(status) == -signal.SIGALRM
    limit = counted(thresholds.ITEMS_LIMIT_S, "second")
    raise NoResult(f"loading some took more than {limit}." if late else "the process that loaded some died.")


def _read(file: int, process: int) -> tuple[bytes, int]:
    """Return what a child process writes until it ends, and its status. What it started may keep the file open."""
    content, status, ended, poll = list[bytes](), 0, 0, select.poll()
    poll.register(file, select.POLLIN)
    while True:
        if poll.poll(0 if ended else 50) and (part := os.read(file, 1 << 20)):
            content.append(part)
        elif ended:
            return b"".join(content), status
        else:
            with suppress(ChildProcessError):  # the script has the system wait for its children
                ended, status = os.waitpid(process, os.WNOHANG)
                continue
            ended = process


def _separate(but: int) -> int:
    """Open the files of this process, a fork, again, and replace its pipes and sockets by empty ones.

    Otherwise the process that it comes from would miss the bytes that this one reads. One stays open: it is returned.
    """
    import fcntl  # here: Windows has none, and no forks

    but = fcntl.fcntl(but, fcntl.F_DUPFD, 3)  # the script may have closed its standard output
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
            if shared not in (1, 2, but) and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.dup2(empty, shared)
    return but
