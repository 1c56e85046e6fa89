"""Images that one process makes for all: the others wait, and are told for whom."""

import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import filelock
import pytest

from helpers.data import sharing


def test_of_callers_that_come_at_once_one_makes_it_and_the_others_wait(tmp_path):
    made, meeting = tmp_path / "made", threading.Barrier(8)

    def make():
        time.sleep(0.1)
        with open(made, "ab") as file:
            file.write(b".")

    def call():
        meeting.wait()
        sharing.once(tmp_path, made.exists, make)

    with ThreadPoolExecutor(8) as threads:
        for ended in [threads.submit(call) for _ in range(8)]:
            ended.result()
    assert made.read_bytes() == b"."


def test_who_holds_the_lock_is_named_and_is_not_waited_for_without_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharing, "LONGEST_WAIT_S", 0.2)
    holder = rf"Process {os.getpid()} of \w+" if sys.platform == "linux" else "Another process"
    with (
        filelock.FileLock(tmp_path / ".preparing.lock"),
        pytest.raises(sharing.HeldTooLong, match=f"{holder} has held it"),
    ):
        sharing.once(tmp_path, lambda: None, lambda: 1 / 0)
    assert re.match(f"{holder} is preparing images", capsys.readouterr().out)
