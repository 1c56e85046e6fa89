import gzip
import json

import pytest
import torch
from torch.utils.data import DataLoader

from helpers import simulate
from helpers.loading import datasets
from helpers.timing import profiling


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    return tmp_path


def steps_in(file):
    with gzip.open(file) as content:
        events = json.load(content)["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith("ProfilerStep") and event["ph"] == "X"]


def traces_in(folder):
    return sorted(folder.glob("*.pt.trace.json.gz"))


def loader(workers=0):
    return DataLoader(datasets.SleepDataset(30, 0.001), batch_size=2, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_span_is_a_trace_with_just_the_active_steps(own_runs, workers):
    folder = profiling.record(loader(workers), simulate.SimulatedAccelerator(1), "nb/run", active=3, spans=2)
    assert folder == own_runs / "nb" / "run"
    files = traces_in(folder)
    assert len(files) == 2
    assert [len(steps_in(file)) for file in files] == [3, 3]


def test_recording_again_replaces_the_earlier_traces():
    first = set(traces_in(profiling.record(loader(), simulate.SimulatedAccelerator(1), "nb/run", active=1)))
    second = set(traces_in(profiling.record(loader(), simulate.SimulatedAccelerator(1), "nb/run", active=1)))
    assert len(second) == 1
    assert not first & second


def test_a_failed_recording_leaves_the_earlier_traces(own_runs):
    folder = profiling.record(loader(), simulate.SimulatedAccelerator(1), "nb/run", active=1)
    before = set(folder.iterdir())

    def failing(images, labels):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        profiling.record(loader(), failing, "nb/run", active=1)
    assert set(folder.iterdir()) == before
    assert list(own_runs.iterdir()) == [own_runs / "nb"]


def test_without_options_a_trace_has_neither_shapes_nor_stacks():
    step = torch.nn.Linear(3, 2)
    batch = [(torch.zeros(4, 3), None)]
    light = profiling.record(batch, lambda images, labels: step(images), "nb/light", active=1)
    heavy = profiling.record(batch, lambda images, labels: step(images), "nb/heavy", active=1, record_shapes=True)
    texts = [gzip.open(traces_in(folder)[0], "rt").read() for folder in (light, heavy)]
    assert ["Input Dims" in text for text in texts] == [False, True]
    assert profiling.size_kb(light) == pytest.approx(traces_in(light)[0].stat().st_size / 1e3)


def test_the_stopwatch_that_runs_along_has_just_the_recorded_steps_of_the_traces():
    folder = profiling.record(loader(2), simulate.SimulatedAccelerator(3), "nb/run", active=3, spans=2)
    table = profiling.stopwatch(folder)
    recorded = [int(name.split("#")[1]) for file in traces_in(folder) for name in steps_in(file)]
    assert table.index.tolist() == recorded
    assert (table["step"] >= table["wait"] + 3000).all()


def test_a_slim_trace_is_asked_for_and_leaves_out_what_happened_inside_loading():
    sizes = {}
    for slim in (False, True):
        folder = profiling.record(loader(), simulate.SimulatedAccelerator(1), "nb/run", active=2, slim=slim)
        (file,) = traces_in(folder)
        assert len(steps_in(file)) == 2
        sizes[slim] = len(gzip.decompress(file.read_bytes()))
    assert sizes[True] < sizes[False]


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"found thesis\.txt in it"):
        profiling.record(loader(), simulate.SimulatedAccelerator(1), tmp_path / "thesis", active=1)
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "years of work"
