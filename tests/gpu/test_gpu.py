"""The command of the runs on a GPU, with trivial work in the place of a GPU's."""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from helpers import config
from tests.gpu import __main__ as command
from tests.gpu import catalogue, measuring, results

# Not on the machine for which the runs are written
MISSING = "IPython google_crc32c jupyterlab lmdb matplotlib nbformat obstore orjson torchcodec".split()


def variants(calls):
    """Two variants, which add their names to the calls whenever they are measured."""

    def measure(name):
        calls.append(name)
        return {"step_ms": 1.0}

    return {name: lambda name=name: partial(measure, name) for name in ("slow", "fast")}


def line(**others):
    where = {"run": 3, "process": 0, "card": "NVIDIA H200", "torch": "2.11.0", "small": False}
    named = {"comparison": "bfloat16", "variant": "eager", "baseline": "eager", "round": 0}
    return where | named | {"figures": {"images_per_second": 100.0}} | others


def test_a_run_goes_on_where_a_half_written_file_stops(tmp_path):
    calls, again = [], []
    measuring.Run(1, tmp_path, seconds=60).compare("steps", variants(calls), rounds=2)
    assert sorted(calls) == ["fast", "fast", "slow", "slow"]
    path = tmp_path / results.NAME
    path.write_bytes(path.read_bytes()[:-20])  # as if the process had been killed
    measuring.Run(1, tmp_path, seconds=60).compare("steps", variants(again), rounds=2)
    assert again == calls[-1:]
    rounds = [(each["variant"], each["round"]) for each in results.read(path)]
    assert sorted(rounds) == [("fast", 0), ("fast", 1), ("slow", 0), ("slow", 1)]


def test_a_trace_of_three_steps_is_written_once(tmp_path):
    steps = measuring.Steps(torch.add, [(torch.ones(2), torch.ones(2))], count=2)
    for _ in range(2):
        measuring.Run(1, tmp_path, seconds=60).compare("steps", {"one, plain": lambda: steps}, 1, traced=["one, plain"])
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["1-steps-one-plain.pt.trace.json.gz"]
    assert [each["round"] for each in results.read(tmp_path / results.NAME)] == [0, None]


def test_nothing_begins_after_the_bound_and_what_is_missing_is_named(tmp_path):
    now, late = [0.0], {"late": lambda: lambda: now.__setitem__(0, 61.0) or {"step_ms": 1.0}}
    some = variants([]) | late
    with mock.patch.object(measuring, "time", SimpleNamespace(monotonic=lambda: now[0])):
        run = measuring.Run(1, tmp_path, seconds=60)
        run.compare("steps", some, rounds=3)
        run.compare("more", some)
    measured = [each["variant"] for each in results.read(tmp_path / results.NAME)]
    assert measured.count("late") == 1 and measured[-1] == "late"
    assert {f"{name}: {each}" for name in ("steps", "more") for each in some} == set(run.missing)


def test_a_variant_that_raises_is_missing_and_the_rest_is_measured(tmp_path):
    run = measuring.Run(1, tmp_path, seconds=60)
    run.compare("steps", variants([]) | {"slow": lambda: 1 / 0})
    assert run.missing == {"steps: slow": "ZeroDivisionError: division by zero"}
    assert len(results.of(results.read(tmp_path / results.NAME), variant="fast")) == 3
    assert "FAILED: steps: slow" in results.table("", results.read(tmp_path / results.NAME), [])


@pytest.mark.parametrize("rate, mark", [(140.0, "as believed"), (110.0, "SURPRISE")])
def test_a_ratio_outside_of_what_was_believed_is_a_surprise(rate, mark):
    lines = [line(), line(variant="compile", figures={"images_per_second": rate})]
    table = results.table("Run 3", lines, results.predictions())
    assert f"{mark}: measured ÷ predicted {rate / 100 / (1.35 * 1.6) ** 0.5:.2f}" in table


def test_figures_of_small_sizes_are_marked_and_held_against_no_prediction():
    table = results.table("Run 3", [line(small=True), line(small=True, variant="compile")], results.predictions())
    assert "no figure is a result" in table and "predicted" not in table


def test_the_list_names_the_cards_whose_results_are_committed(tmp_path, capsys):
    (tmp_path / "h200").mkdir()
    lines = [line(), line(run=1, small=True), line(run=4, card="NVIDIA H100 80GB HBM3")]
    (tmp_path / "h200" / "gpu.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    rows = {row.split()[0]: row for row in catalogue.listing(tmp_path).splitlines()}
    assert [number for number in rows if "H200" in rows[number]] == ["3"]
    assert [number for number in rows if "H100" in rows[number]] == ["4"]
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert [entry.number for entry in catalogue.QUEUE if entry.proves not in listed] == []


def test_each_prediction_belongs_to_a_run_with_a_script():
    assert {each.run for each in results.predictions()} <= {entry.number for entry in catalogue.QUEUE if entry.measure}


@pytest.mark.processes
def test_the_runs_need_nothing_that_a_plain_installation_of_pytorch_lacks():
    modules = {entry.measure.partition(":")[0] for entry in catalogue.QUEUE} - {""}
    lines = [
        f"import sys; sys.modules.update(dict.fromkeys({MISSING}))",
        *(f"import tests.gpu.{each}" for each in modules),
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=config.PROJECT, check=True)
