"""Images that one process makes for all: the others wait, and are told for whom."""

import multiprocessing
import os
import re
import sys
import time

import filelock
import pytest

from helpers.data import sharing


def make(folder, meeting):
    made = folder / "made"

    def write():
        time.sleep(0.5)
        with open(made, "ab") as file:
            file.write(b".")

    meeting.wait()
    sharing.once(folder, made.exists, write)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_of_thirty_processes_one_makes_it_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    meeting = context.Barrier(30)
    processes = [context.Process(target=make, args=(tmp_path, meeting)) for _ in range(30)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 30
    assert (tmp_path / "made").read_bytes() == b"."


def test_who_holds_the_lock_is_named_and_is_not_waited_for_without_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharing, "LONGEST_WAIT_S", 0.2)
    holder = rf"Process {os.getpid()} of \w+" if sys.platform == "linux" else "Another process"
    with (
        filelock.FileLock(tmp_path / ".preparing.lock"),
        pytest.raises(sharing.HeldTooLong, match=f"{holder} has held it"),
    ):
        sharing.once(tmp_path, lambda: None, lambda: 1 / 0)
    assert re.match(f"{holder} is preparing images", capsys.readouterr().out)
