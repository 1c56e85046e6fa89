"""A reference is recorded as the notebooks measure, goes on after an interruption, and says nothing private."""

import dataclasses
import gzip
import inspect
import multiprocessing
import os
import re
import signal
from pathlib import Path

import nbformat
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers import __main__, config, simulate, traces, training
from helpers.results import recording, rungs, scoreboard

ROUNDS = 2  # of the preset ci


@pytest.fixture(autouse=True)
def ci(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_PRESET", "ci")
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def unhurried(monkeypatch):
    """Let no run end early, however long its steps take on a busy machine."""
    preset = dataclasses.replace(config.preset(), longest_run=float("inf"))
    monkeypatch.setattr(config, "preset", lambda: preset)


class Counting:
    """A step that counts how often it was called."""

    def __init__(self):
        self.calls, self.accelerator = 0, simulate.SimulatedAccelerator(1)

    def __call__(self, images, labels):
        self.calls += 1
        self.accelerator(images, labels)

    def __str__(self):
        return "a step"


def record(groups, out):
    return recording.record_reference(groups, out, __main__._draw_ladder)


def loader(workers=0):
    return DataLoader(TensorDataset(torch.zeros(8, 1), torch.zeros(8)), 2, num_workers=workers)


def group(*steps, workers=0):
    names = [f"{number:02d} rung" for number in range(len(steps))]
    baselines = [None, *names]
    return recording.Group(
        tuple(
            recording.Rung(name, loader(workers), step, baseline)
            for name, step, baseline in zip(names, steps, baselines, strict=False)
        ),
        "zeros",
        steps=3,
    )


def test_a_reference_has_a_result_and_a_light_trace_for_every_rung(tmp_path, unhurried):
    assert record([lambda: group(Counting(), Counting())], tmp_path / "out") == []
    results = scoreboard.read(tmp_path / "out" / "scoreboard.jsonl")
    assert [result.rung for result in results] == ["00 rung", "01 rung"]
    assert all(
        (result.rounds, result.steps, result.data, result.step) == (ROUNDS, 3, "zeros", "a step") for result in results
    )
    assert [result.ratio is None for result in results] == [True, False]
    for result in results:
        (trace,) = (tmp_path / "out" / "traces" / result.rung.replace(" ", "-")).glob("*.pt.trace.json.gz")
        assert len(traces.breakdown(trace)) == 2
        assert trace.stat().st_size < 1e6
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"| 01 rung | {results[1].images_per_second:,.0f} (" in page
    first, second = (next(line for line in page.splitlines() if line.startswith(f"| {rung} ")) for rung in ("00", "01"))
    assert "| – |" in first and f"{results[1].ratio:.2f}× to 00 rung: " in second
    assert [result.baseline for result in results] == [None, "00 rung"]
    assert "- 01 rung: TensorDataset, in batches of 2, in order, 0 workers; a step\n" in page
    assert all((tmp_path / "out" / name).stat().st_size > 1000 for name in ("ladder.png", "waiting.png"))


def test_the_page_says_how_fast_the_clocks_of_a_gpu_were(tmp_path, monkeypatch):
    its = recording.machine() | {"clocks": {"multiprocessors": 1755, "memory": 2619}}
    monkeypatch.setattr(recording, "machine", lambda: its)
    record([lambda: group(Counting())], tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| clocks | multiprocessors 1,755 MHz, memory 2,619 MHz |" in page


def test_a_reference_names_neither_the_machine_nor_its_folders(tmp_path):
    record([lambda: group(Counting())], tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        content = b"" if path.is_dir() or path.suffix == ".png" else path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        for private in (os.uname().nodename, str(tmp_path), f"{Path.home()}/", "/tmp/"):
            assert private not in path.relative_to(tmp_path).as_posix()
            assert f'"{private}'.encode() not in content, path
            assert f" {private}".encode() not in content, path


def test_rungs_are_timed_interleaved(tmp_path, unhurried):
    order = []
    steps = [lambda images, labels, name=name: order.append(name) for name in "ab"]
    record([lambda: group(*steps)], tmp_path / "out")
    timed = "".join(order)[-(ROUNDS * 2 * (2 + 3)) :]  # after the traces; each with two steps of warm-up
    assert timed == ("a" * 5 + "b" * 5) * ROUNDS


def interrupt_in_the_second_round(out):
    os.environ["COURSE_PRESET"] = "ci"

    def killing(images, labels):
        if (out / "timings.jsonl").exists() and len((out / "timings.jsonl").read_text().splitlines()) == 3:
            with open(out / "timings.jsonl", "a") as file:
                file.write('{"rung": "01 rung", "timing": {}')  # in the middle of writing
            os.kill(os.getpid(), signal.SIGKILL)

    record([lambda: group(Counting(), killing)], out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use CUDA, and a started one takes long")
def test_a_recording_that_was_killed_goes_on_where_it_was(tmp_path, unhurried):
    out = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(target=interrupt_in_the_second_round, args=(out,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (out / "scoreboard.jsonl").exists()
    stored = (out / "timings.jsonl").read_text().splitlines()[:3]
    first, second = Counting(), Counting()
    record([lambda: group(first, second)], out)
    assert (out / "timings.jsonl").read_text().splitlines()[:3] == stored
    assert len((out / "timings.jsonl").read_text().splitlines()) == 2 * ROUNDS
    assert (first.calls, second.calls) == (0, 5)  # one run of the second rung was left, with its warm-up
    assert [result.rounds for result in scoreboard.read(out / "scoreboard.jsonl")] == [ROUNDS, ROUNDS]


@pytest.mark.processes
def test_a_recording_with_another_number_of_workers_is_timed_anew(tmp_path):
    record([lambda: group(Counting())], tmp_path / "out")
    again = Counting()
    record([lambda: group(again, workers=1)], tmp_path / "out")
    assert again.calls > 0
    (result,) = scoreboard.read(tmp_path / "out" / "scoreboard.jsonl")
    assert (result.workers, result.rounds) == (1, ROUNDS)


def test_the_recording_of_another_machine_is_not_touched(tmp_path, monkeypatch):
    record([lambda: group(Counting())], tmp_path / "out")
    monkeypatch.setattr(recording, "_processor", lambda: "another processor")
    with pytest.raises(
        recording.OtherRecording, match=r"processor '.*' instead of 'another processor'. Name another folder"
    ):
        record([lambda: group(Counting())], tmp_path / "out")


def test_a_rung_that_does_not_fit_into_the_memory_is_left_out_and_named(tmp_path):
    def too_large(images, labels):
        raise training.OutOfMemory(2, RuntimeError("8 GB are not enough"))

    left_out = record([lambda: group(Counting(), too_large, Counting())], tmp_path / "out")
    assert left_out == ["01 rung: A step with 2 images does not fit into the GPU's memory: 8 GB are not enough"]
    results = scoreboard.read(tmp_path / "out" / "scoreboard.jsonl")
    assert [(result.rung, result.ratio) for result in results] == [("00 rung", None), ("02 rung", None)]
    assert left_out[0] in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_without_a_package_its_rungs_are_left_out_and_the_package_is_named(tmp_path):
    def formats():
        import a_package_that_is_missing  # noqa: F401

    left_out = record([formats, lambda: group(Counting())], tmp_path / "out")
    assert left_out == ["formats: the package a_package_that_is_missing is not installed"]
    assert [result.rung for result in scoreboard.read(tmp_path / "out" / "scoreboard.jsonl")] == ["00 rung"]


def test_without_matplotlib_all_but_the_figure_is_recorded(tmp_path):
    def draw(table, path):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    left_out = recording.record_reference([lambda: group(Counting())], tmp_path / "out", draw)
    assert left_out == ["the figure: the package matplotlib is not installed"]
    assert "Left out: the figure" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_the_rungs_have_the_names_that_the_notebooks_give_them():
    cells = [
        cell.source
        for path in (config.PROJECT / "notebooks").glob("*.ipynb")
        for cell in nbformat.read(path, 4).cells
        if "scoreboard.add" in cell.source
    ]
    assert cells
    for cell in cells:
        assert any(f'"{name}"' in cell for name in {*names(), *rungs.OF_RANKS}), cell


def names():
    """Names of all rungs that `record` times."""
    return {*re.findall(r'Rung\("([^"]+)"', inspect.getsource(rungs)), *rungs.RESNET}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiles the network
def test_every_rung_is_prepared_or_left_out_with_a_reason(drawn_images, monkeypatch):
    for name in ("COURSE_DATA", "COURSE_RUNS"):
        monkeypatch.setenv(name, drawn_images[name])
    groups = [prepare() for prepare in rungs.GROUPS]
    prepared = {rung.name for group in groups for rung in group.rungs}
    left_out = {reason.partition(":")[0] for group in groups for reason in group.left_out}
    assert prepared | left_out == names() - ({"08 with TF32"} if not torch.cuda.is_tf32_supported() else set())


def test_the_command_records_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rungs, "GROUPS", [lambda: group(Counting())])
    for _ in range(2):
        assert __main__.main(["record", "--out", str(tmp_path / "out")]) == 0
        assert "| 00 rung |" in capsys.readouterr().out
