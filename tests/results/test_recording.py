"""A recording: the notebooks executed several times, and what their rungs measured, over all processes."""

import json
from dataclasses import replace

import nbformat
import pytest

from helpers import config
from helpers.__main__ import main
from helpers.lessons import execute, recording
from helpers.results import scoreboard
from stepscope import traces

CELL = """
import torch
from helpers import config
from helpers.results import scoreboard
from stepscope import timing
from stepscope.timing import profiling

folder = config.start("01-rungs")
batches, step = [torch.zeros(2, 3)] * 9, torch.nn.Linear(3, 1)
runs = {name: lambda: timing.loop(batches, step, 3) for name in ("before", "now")}
compared = timing.interleaved(runs, 2)
trace = profiling.record(batches, step, folder / "now", active=2)
assert not scoreboard.latest("01"), "this notebook's own result is there before it ran"
shared = {"loader": batches, "step": "a layer", "data": "zeros", "trace": trace}
scoreboard.add("01 before", compared, "before", **shared)
scoreboard.add("01 now", compared, "now", baseline="before", **shared)
"""


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """Write notebooks of one cell each, by their names, in the place of the course's."""
    monkeypatch.setenv("COURSE_PRESET", "ci")
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path)

    def write(**cells):
        for name, cell in cells.items():
            book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
            nbformat.write(book, tmp_path / f"{name[1:].replace('_', '-')}.ipynb")
        return tmp_path / "out"

    return write


@pytest.mark.slow
def test_each_rung_has_a_result_over_all_processes_and_a_trace_and_a_recording_goes_on(notebooks, capfd):
    out = notebooks(
        _01_rungs=CELL, _02_none="1 / 0  # adds no rung: not executed", _03_fails="1 / 0  # scoreboard.add("
    )
    options = ["--out", str(out), "--processes", "2"]
    assert main(["record", *options]) == 1
    errors = capfd.readouterr().err
    assert "ZeroDivisionError" in errors and "02-none" not in errors
    results = {result.rung: result for result in scoreboard.read(out / "scoreboard.jsonl")}
    each = [result.rate.mean for result in scoreboard.read(out / "processes.jsonl") if result.rung == "01 now"]
    assert list(results) == ["01 before", "01 now"] and len(each) == 2
    assert results["01 now"].rate.mean == pytest.approx((each[0] * each[1]) ** 0.5)
    assert (results["01 now"].processes, results["01 now"].ratio.count) == (2, 2)
    assert len(traces.breakdown(out / scoreboard.trace_folder("01 now"))) == 2
    assert "| 01 now |" in (out / "README.md").read_text(encoding="utf-8")
    assert (out / "ladder.png").exists() and (out / "waiting.png").exists()
    before = (out / "processes.jsonl").read_bytes()
    assert main(["record", "01", *options]) == 0
    assert (out / "processes.jsonl").read_bytes() == before  # measured once


def test_what_the_device_idles_is_the_mean_over_the_processes_that_know_it(notebooks, monkeypatch):
    monkeypatch.setattr(recording, "draw", lambda out: None)  # it takes seconds
    out = notebooks()
    result = scoreboard.read(scoreboard.REFERENCE / "cpu-2-cores" / "scoreboard.jsonl")[0]
    shares = 0.1, None, 0.3  # a profiler may lose the kernels of one process
    results = [replace(result, device_idle=share) for share in shares]
    out.mkdir()
    (out / "processes.jsonl").write_text(scoreboard.lines(results))
    recording.record(out)
    assert scoreboard.read(out / "scoreboard.jsonl")[0].device_idle == pytest.approx(0.2)


def test_the_recording_of_another_machine_is_refused(notebooks):
    out = notebooks()
    recording.record(out)
    machine = json.loads((out / "machine.json").read_text())
    (out / "machine.json").write_text(json.dumps(machine | {"date": "1999-01-01"}))
    recording.record(out)
    (out / "machine.json").write_text(json.dumps(machine | {"cores": 4096}))
    with pytest.raises(config.CourseError, match="cores 4096 instead of"):
        recording.record(out)


@pytest.mark.parametrize("options", [["99"], ["--processes", "0"]])
def test_nothing_to_record_is_refused(notebooks, capsys, options):
    assert main(["record", *options, "--out", str(notebooks(_01_rungs=CELL))]) == 1
    assert capsys.readouterr().err.startswith("CourseError: Expected ")
