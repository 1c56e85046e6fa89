"""Tests of what a terminal shows and a file does not, on a real terminal device."""

import os
import sys
from types import SimpleNamespace

import pytest

from stepscope import run
from stepscope.base import terminal

pty = pytest.importorskip("pty")  # not on Windows


@pytest.fixture
def screen(monkeypatch):
    """A terminal: a stream, and a function that returns what the stream has shown."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    leader, follower = pty.openpty()
    with open(follower, "w") as stream:

        def shown():
            stream.close()
            return b"".join(iter(lambda: read(leader), b"")).decode()

        yield stream, shown
    os.close(leader)


def read(leader):
    try:
        return os.read(leader, 10_000)
    except OSError:  # Linux: the other side is closed, and all is read
        return b""


def announce(monkeypatch, stream, *seen):
    """Announce 60 steps of a minute each, after so many of them."""
    monkeypatch.setattr(sys, "stderr", stream)  # not in a fixture: pytest sets it again before the test
    announcement = run.Announcement()
    for steps in seen:
        announcement([{"so_far": {"steps_seen": steps, "steps_left": 60 - steps, "seconds_left": 60.0}}])


def test_a_terminal_gets_one_line_of_progress_that_is_replaced_only_when_it_changes(screen, monkeypatch):
    stream, shown = screen
    announce(monkeypatch, stream, 3, 3, 3, 9)
    lines = [f"stepscope: step {seen} of about 60; then the script goes on  \x1b[K" for seen in (3, 9)]
    assert shown().split("\r")[1:] == lines


def test_a_file_gets_one_announcement_of_a_long_wait(tmp_path, monkeypatch):
    with open(tmp_path / "log.txt", "w") as log:
        announce(monkeypatch, log, 3, 9)
    text = (tmp_path / "log.txt").read_text()
    assert text.count("57 more steps") == 1 and not any(sign in text for sign in ("\r", "\x1b", "51"))


def test_colours_are_for_terminals_without_a_wish_for_none(tmp_path, monkeypatch, screen):
    stream, _ = screen
    assert terminal.colours(stream)
    with open(tmp_path / "log.txt", "w") as log:
        assert not terminal.colours(log)
    assert not terminal.colours(log) and not terminal.colours(None)  # closed, and not there
    assert not terminal.colours(SimpleNamespace(write=print))  # such as a logger in the place of stderr
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not terminal.colours(stream)
