import gzip
import json

import pytest
import torch
from support import loops
from torch.utils.data import DataLoader

from stepscope import traces
from stepscope.timing import profiling


def steps_in(file):
    with gzip.open(file) as content:
        events = json.load(content)["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith("ProfilerStep") and event["ph"] == "X"]


def loader(workers=0):
    return DataLoader(loops.SleepDataset(30, 0.003), batch_size=2, num_workers=workers)


@pytest.mark.parametrize(("workers", "whole"), [(0, 3), (2, 4)])
def test_the_trace_has_only_the_active_steps_in_whole_periods_and_a_stopwatch_times_them(tmp_path, workers, whole):
    folder = profiling.record(loader(workers), loops.SleepStep(3), tmp_path / "run", active=3)
    assert folder == tmp_path / "run"
    (file,) = folder.glob("*.pt.trace.json.gz")
    steps = steps_in(file)
    assert len(steps) == whole
    table = profiling.stopwatch(folder)
    assert table.index.tolist() == [int(name.split("#")[1]) for name in steps]
    assert (table["step"] >= table["wait"] + 3000).all()
    ours = traces.breakdown(folder)
    waits, whole = table["wait"] - ours["DataLoader"], table["step"] - ours.sum(axis=1)
    assert max(abs(waits).min(), abs(whole).min()) < 2000  # µs: on a busy machine much comes between, not in each step


def test_a_failed_recording_leaves_the_earlier_traces(tmp_path):
    folder = profiling.record(loader(), loops.SleepStep(1), tmp_path / "run", active=1)
    before = set(folder.iterdir())

    def failing(images, labels):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        profiling.record(loader(), failing, tmp_path / "run", active=1)
    assert set(folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_an_option_of_the_profiler_is_passed_on(tmp_path):
    step = torch.nn.Linear(3, 2)
    texts = []
    for options in ({}, {"record_shapes": True}):
        folder = profiling.record([torch.zeros(4, 3)], step, tmp_path / "run", active=1, **options)
        (file,) = folder.glob("*.pt.trace.json.gz")
        assert profiling.size_kb(folder) == pytest.approx(file.stat().st_size / 1e3)
        texts.append(gzip.decompress(file.read_bytes()))
    assert [b"Input Dims" in text for text in texts] == [False, True]


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        profiling.record(loader(), loops.SleepStep(1), tmp_path / "thesis", active=1)
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "years of work"


def test_the_gpu_has_finished_earlier_steps_before_the_recording_begins(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(profiling, "synchronize", lambda: done.append("waited"))
    profiling.record(loader(), lambda *_: done.append("step"), tmp_path / "run", active=2)
    assert done[-4:] == ["step", "waited", "step", "step"]


def test_a_recording_that_lost_kernels_warns(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiling, "activities", lambda: [profiling.ProfilerActivity.CPU])
    monkeypatch.setattr(profiling.traces, "lost_kernels", lambda trace: f"{len(trace.spans)} span lost kernels")
    with pytest.warns(UserWarning, match="1 span lost kernels"):
        profiling.record(loader(), lambda *_: None, tmp_path / "run", active=2)
