import os
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from helpers import timing
from helpers.loading import datasets
from helpers.timing import system


@pytest.mark.parametrize("counter", ["strace", "psutil"])
def test_system_calls_are_counted(counter, tmp_path, monkeypatch):
    if counter == "psutil":
        monkeypatch.setattr(system.shutil, "which", lambda name: None)
    elif timing.system_calls(lambda: None).name != "strace":
        pytest.skip("no strace (`apt install strace`), or it may not watch this process")
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def read_often():
        for _ in range(200):
            file = os.open(path, os.O_RDONLY)
            os.read(file, 7)
            os.close(file)

    calls = timing.system_calls(read_often)
    assert calls.name == counter
    if calls.empty:
        pytest.skip("this system counts no reads")
    assert 200 <= calls["read"] < 300
    if counter == "strace":
        assert calls["openat"] == calls["close"] == 200
        assert not {"kill", "wait4"} & set(calls.index)


def test_a_function_that_asks_nothing_of_the_system_is_called_once_too():
    called = []
    for _ in range(10):  # most of these make no system call, some one or two
        timing.system_calls(lambda: called.append(1))
    assert len(called) == 10


def test_where_nothing_counts_there_is_nothing_counted(monkeypatch):
    monkeypatch.setattr(system.shutil, "which", lambda name: None)
    monkeypatch.delattr(system.psutil.Process, "io_counters", raising=False)
    called = []
    assert timing.system_calls(lambda: called.append(1)).empty
    assert called == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_a_forgotten_file_is_read_from_the_disk_and_then_from_memory(tmp_path):
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(os.urandom(8_000_000))
    from_memory = timing.read_from_disk_mb(path.read_bytes)
    timing.forget(tmp_path)
    from_disk = timing.read_from_disk_mb(path.read_bytes)
    if from_memory == from_disk == 0:
        pytest.skip(f"{tmp_path} is not on a disk: `--basetemp=FOLDER` names another")
    assert from_disk == pytest.approx(8, rel=0.05)
    assert min(from_memory, timing.read_from_disk_mb(path.read_bytes)) < 1  # unless memory is needed for something else


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_forgotten_files_that_are_warmed_are_read_from_memory(tmp_path):
    paths = [tmp_path / "below" / str(number) for number in range(4)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(os.urandom(2_000_000))
    timing.forget(tmp_path)
    if timing.read_from_disk_mb(lambda: timing.warm(tmp_path)) == 0:
        pytest.skip(f"{tmp_path} is not on a disk: `--basetemp=FOLDER` names another")
    assert timing.read_from_disk_mb(lambda: [path.read_bytes() for path in paths]) < 1


def test_where_files_cannot_be_forgotten_that_is_said(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert not timing.forget(tmp_path)


def test_each_worker_is_counted_in_the_memory():
    batches = iter(DataLoader(datasets.SleepDataset(40, 0.0), batch_size=2, num_workers=2))
    next(batches)
    memory = timing.worker_memory_mb()
    assert len(memory) == 2
    assert all(megabytes > 1 for megabytes in memory)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
def test_a_list_of_names_grows_in_a_worker_and_an_array_does_not():
    growth = {kind: timing.worker_growth_mb(datasets.FileNames(300_000, kind)) for kind in ("list", "array")}
    assert growth["list"] > 10
    assert growth["array"] < growth["list"] / 3


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_what_the_library_does_inside_a_convolution_is_counted(capfd):
    convolution, images = torch.nn.Conv2d(16, 32, 3), torch.randn(4, 16, 20, 20)

    def forward(memory_format):
        def function():
            convolution.to(memory_format=memory_format)(images.contiguous(memory_format=memory_format))

        return function

    contiguous = timing.onednn(forward(torch.contiguous_format))
    channels_last = timing.onednn(forward(torch.channels_last))
    assert contiguous.loc["convolution", "calls"] == channels_last.loc["convolution", "calls"] == 1
    assert contiguous.loc["reorder", "calls"] > channels_last["calls"].get("reorder", 0)
    assert (contiguous["ms"] > 0).all()
    os.write(1, b"visible again\n")
    assert capfd.readouterr().out == "visible again\n"


def test_a_function_without_convolutions_asks_nothing_of_the_library():
    assert timing.onednn(lambda: None).empty


def test_without_onednn_nothing_is_counted(monkeypatch):
    called = []
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "verbose", None)
    assert timing.onednn(lambda: called.append(1)).empty
    assert called == [1]
