import dataclasses
import io
import json
import multiprocessing
import os
import re
import sys
import types
from unittest import mock

import pytest
import torch
from support import cuda_trace
from support.timed import compared
from torch.utils.data import DataLoader

from helpers import config, simulate
from helpers.__main__ import main
from helpers.results import scoreboard
from stepscope import traces

INFINITE = {"mean": float("inf"), "lowest": 1, "highest": float("inf"), "count": 3}


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    monkeypatch.setenv("COURSE_PRESET", "ci")
    return tmp_path


def add(rung, *rates, before=None):
    comparison, baseline = compared(*rates, before=before), "before" if before else None
    loader, step = DataLoader(range(8), num_workers=1), simulate.SimulatedGPU(5)
    return scoreboard.add(rung, comparison, "now", baseline=baseline, loader=loader, step=step, data="CIFAR-10")


def test_a_result_is_read_as_it_was_stored():
    stored = add("01 naive", 100, 300, 200)
    assert scoreboard.read() == [stored]
    assert stored.rate.mean == pytest.approx(6e6 ** (1 / 3))
    assert stored.rate.lowest < 100 and stored.rate.highest > 300  # three rounds that differ so much say little
    assert (stored.rounds, stored.baseline) == (3, None)
    assert stored.loading_share == pytest.approx(0.25)
    assert (stored.data, stored.preset) == ("CIFAR-10", "ci")
    assert all([stored.device, stored.cores, stored.torch, stored.date, stored.step])


def test_the_ladder_has_the_latest_result_of_each_rung_in_the_order_of_the_notebooks():
    added = {"03 workers": 300, "05 photos": 20, "07 batches": 400, "12 fused": 8, "12 fewer": 9, "01 naive": 100}
    add("01 naive", 50)
    for rung, rate in added.items():
        add(rung, rate)
    rates = {result.rung: round(result.rate.mean) for result in scoreboard.ladder()}
    assert list(rates) == ["01 naive", "03 workers", "05 photos", "07 batches", "12 fused", "12 fewer"]
    assert rates == added
    assert scoreboard.latest("01").rung == "01 naive" and scoreboard.latest("04") is None


def test_every_recorded_ratio_says_what_it_is_against():
    boards = list(scoreboard.REFERENCE.glob("*/scoreboard.jsonl"))
    assert boards
    for board in boards:
        results = scoreboard.read(board)
        rungs = [result.rung for result in results]
        assert all((result.ratio is None) == (result.baseline is None) for result in results)
        against = [result.baseline for result in results if result.baseline]
        assert [each for each in against if each[:2].isdigit() and each not in rungs] == []  # others are variants
        page = (board.parent / "README.md").read_text(encoding="utf-8")
        assert all(f" {scoreboard.ratio_text(result) or '–'} |" in page for result in results)


def test_what_the_device_idles_is_another_column_than_what_the_host_waits_and_comes_from_the_trace(tmp_path):
    path = tmp_path / "gpu.pt.trace.json"
    path.write_text(json.dumps(cuda_trace.trace()))
    step = types.SimpleNamespace(step=simulate.SimulatedGPU(7))  # as a recorded graph: the step that it replays
    stored = scoreboard.add("01 naive", compared(100, 100), "now", loader=[], step=step, data="CIFAR-10", trace=path)
    assert stored.device_idle == pytest.approx(1 - traces.accelerators(path)["utilization"].max())
    assert 0 < stored.device_idle < 1
    assert stored.step == "simulated GPU (7 ms a step)"
    assert scoreboard.ladder_text().splitlines()[1].split()[-3:] == ["25%", f"{stored.device_idle:.0%}", "–"]


def test_the_ladder_in_words_has_a_line_a_rung_and_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    add("01 naive", 100)
    add("03 workers", 300, 330, before=[100, 100])
    add("04 device", 300, 400, before=[300.3, 400])
    lines = scoreboard.ladder_text().splitlines()
    assert "25%" in lines[1] and lines[1].endswith("–")
    assert lines[2].startswith("03 workers") and "3.15× to “before”: faster (1.72 to 5.76 in 2 rounds)" in lines[2]
    assert "1.00× to “before”: equal" in lines[3]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["ladder"]) == 0
    sys.stdout.flush()
    assert re.search(rb"01 naive .* \?\n", sys.stdout.buffer.getvalue())


@pytest.fixture
def machine(own_runs, monkeypatch):
    """A folder for the scoreboard of a recorded machine."""
    monkeypatch.setattr(scoreboard, "REFERENCE", own_runs / "reference")
    (own_runs / "reference" / "a-machine").mkdir(parents=True)
    return own_runs / "reference" / "a-machine"


def test_a_rung_stands_beside_that_of_recorded_machines(own_runs, machine):
    add("09 ResNet-50", 100)
    assert [name for name, _ in scoreboard.references("09")] == ["your machine"]
    (own_runs / "scoreboard.jsonl").rename(machine / "scoreboard.jsonl")
    add("09 ResNet-50", 50)
    add("09 with TF32", 70)
    rates = [(name, round(result.rate.mean)) for name, result in scoreboard.references("09")]
    assert rates == [("your machine", 50), ("your machine", 70), ("a-machine", 100)]


def test_a_result_keeps_how_long_its_baseline_waited_in_the_same_rounds():
    assert add("01 naive", 100).baseline_loading_share is None
    assert add("03 workers", 300, before=[100]).baseline_loading_share == pytest.approx(0.25)


@pytest.mark.parametrize(("device", "borrowed"), [("NVIDIA H200", ["a-machine"]), ("CPU", [])])
def test_without_a_gpu_the_traces_of_recorded_ones_lie_beside_ones_own(
    own_runs, machine, monkeypatch, capsys, device, borrowed
):
    trace = machine / "traces" / "09-ResNet-50" / "reference.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"a trace")
    stored = dataclasses.replace(add("09 ResNet-50", 100), device=device)
    (machine / "scoreboard.jsonl").write_text(scoreboard.lines([stored]))
    monkeypatch.setattr(scoreboard.torch.cuda, "is_available", lambda: False)
    own = own_runs / "09-resnet50"
    for _ in range(2):
        assert scoreboard.borrow_traces("09", own) == {name: own / name for name in borrowed}
    files = [path for path in own.rglob("*") if path.is_file()]
    assert [(path.parent.name, path.read_bytes()) for path in files] == [(name, b"a trace") for name in borrowed]
    assert capsys.readouterr().out.count("NVIDIA H200") == 2 * len(borrowed)


@pytest.mark.parametrize("damage", [
    {"rate": {"mean": "1"}}, {"workers": "2"}, {"rate": INFINITE}, {"x": 1}, {"rung": "\ud800"}, {"baseline": "a"}, "[",
])  # fmt: skip
def test_a_damaged_line_is_named(own_runs, damage):
    good = dataclasses.asdict(add("01 naive", 100))
    line = damage * 10**5 if damage == "[" else json.dumps(good | damage)
    with open(own_runs / "scoreboard.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(config.CourseError, match=r"scoreboard\.jsonl, line 2"):
        scoreboard.read()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_scoreboard_that_is_no_regular_file_is_named_and_neither_read_nor_replaced(own_runs):
    board = own_runs / "scoreboard.jsonl"
    os.mkfifo(board)
    for use in (scoreboard.ladder_text, lambda: add("01 naive", 100)):
        with pytest.raises(config.CourseError, match=r"scoreboard\.jsonl: expected .* found"):
            use()
    assert board.is_fifo()


def test_a_result_that_cannot_be_written_leaves_the_scoreboard_as_it_was(monkeypatch):
    stored = add("01 naive", 100)
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("the disk does not answer")))
    with pytest.raises(OSError, match="does not answer"):
        add("03 workers", 300)
    assert scoreboard.read() == [stored]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use CUDA, and a started one takes long")
def test_processes_that_write_at_once_lose_nothing():
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(add, [(f"{number:02d}", 100) for number in range(12)])
    assert sorted(result.rung for result in scoreboard.read()) == [f"{number:02d}" for number in range(12)]
