"""What all tests of diagnosis share."""

import math

import torch
from pytest import fixture

from stepscope.diagnosis import items, run, step


@fixture
def quick(tmp_path, monkeypatch):
    """Look for a short time, as on a machine without a GPU, and write the profile to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(items, "SECONDS", 0.3)
    monkeypatch.setattr(run, "PROFILED", 4)
    monkeypatch.setattr(step, "SECONDS", 0.2)
    monkeypatch.setattr(run, "BUSY", math.inf)  # this machine may be; that the findings hold is what is tested
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@fixture
def one_thread(quick, monkeypatch):
    """Two would wait for each other on a busy machine, for longer than a small step takes."""
    monkeypatch.setattr(run, "_threads", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@fixture
def names():
    """Return the names of a diagnosis's findings."""
    return lambda found: [finding.name for finding in found.findings]
