"""A rung elsewhere: calculated and published figures beside those measured here, and held against each other."""

import json
import re
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support.timed import compared

from helpers import simulate
from helpers.lessons import execute
from helpers.results import elsewhere, pairs, scoreboard

NOISY = compared(100, 210, 130, before=[100, 100, 100])


def test_published_figures_have_all_that_makes_them_worth_citing():
    rows = elsewhere.published()
    assert rows.index.is_unique and len(rows) > 20
    for column in ("change", "unit", "hardware", "settings", "versions", "source"):
        assert rows[column].str.strip().all(), column
    assert rows["url"].str.match(r"https://[\w.]+/\S+$").all()
    assert rows["date"].astype(str).str.fullmatch(r"20\d\d(-\d\d)?").all()
    assert set("01 03 05 06 07 09 10 11 12 14 16".split()) <= set(" ".join(rows["notebooks"]).split())


def test_a_gain_is_of_speed_whatever_the_unit():
    gains = elsewhere.published()["gain"]
    assert gains["F11 ResNet-50"] == pytest.approx(1218.01 / 826.06)
    assert gains["F10"] == pytest.approx(0.258 / 0.198)  # seconds
    assert gains["F22 HDF5, 1 worker"] < 1 and gains["F2 16 workers"] < 1  # what did not pay


@pytest.fixture
def without_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))


@pytest.mark.processes
def test_each_gain_of_a_rung_is_named_by_how_it_was_obtained(without_gpu):
    shown = elsewhere.show("10")
    kinds = [re.match("calculated|measured here|recorded|published", row.where).group() for row in shown.rows]
    assert kinds[:3] == ["calculated"] * 2 + ["recorded"] and set(kinds[3:]) == {"published"}
    assert shown.rows[3].gain == "0.83×"  # first what did not pay
    assert [row.change for row in shown.rows if "published" in row.where][-1] == "channels_last, ResNet-50"  # most
    page = shown._repr_html_()
    table, _, folded = page.partition("<details>")
    assert table.count("<th ") == 3 and "href" not in table
    assert "decided by memory" in folded and 'href="https://github.com/huggingface/pytorch-image-models' in folded
    assert repr(shown).count("\n") == len(shown.rows) and "1.47×" in repr(shown)
    assert shown.caption.startswith("Published gains go from 0.83× to 1.47×")


def recorded(machine, rung):
    """Return a recorded result, and its processor with the number of cores."""
    folder = scoreboard.REFERENCE / machine
    (result,) = [each for each in scoreboard.read(folder / "scoreboard.jsonl") if each.rung == rung]
    return result, f"{json.loads((folder / 'machine.json').read_text())['processor']}, {result.cores} cores"


def test_all_recorded_rungs_of_a_notebook_are_shown(without_gpu):
    gains = {row.change: row.gain for row in elsewhere.show("07").rows if "2 cores" in row.where}
    assert len(gains) == 2  # and the rung before them, without a ratio
    result, _ = recorded("cpu-2-cores", "07 augmented on the device")
    (gain,) = [gain for change, gain in gains.items() if change.startswith("07 augmented on the device")]
    assert gain.startswith(f"{result.ratio.mean:.2f}× (")


def test_the_caption_names_published_changes_that_made_training_slower(without_gpu):
    assert "below 1× the change made training slower" in elsewhere.show("03").caption
    assert elsewhere.show("04").caption == ""  # nothing is published


def test_a_clear_verdict_stands_alone(without_gpu):
    clear = compared(200, 210, 205, before=[100, 101, 102])
    assert elsewhere.verdict(clear, "now", "before", "03 more workers") == clear.verdict("now")


def test_below_a_noisy_verdict_stands_what_the_nearest_machine_recorded(without_gpu):
    own, other = elsewhere.verdict(NOISY, "now", "before", "03 more workers").splitlines()
    assert own == NOISY.verdict("now")
    result, processor = recorded("cpu-2-cores", "03 more workers")
    found = f"Recorded on {processor}: 03 more workers, {result.ratio.mean:.2f}× ({result.ratio.lowest:.2f} – "
    assert other.startswith(found) and re.search(r"\) against .*1 worker.*\.$", other)
    assert elsewhere.verdict(NOISY, "now", "before", "03 never recorded") == own


def test_the_nearest_machine_has_the_same_kind_of_device(without_gpu, monkeypatch):
    monkeypatch.setattr(elsewhere.machine, "cores", lambda: 16)  # as the H200's
    references = scoreboard.references
    other = replace(recorded("h200", "11 mixed precision")[0], rung="03 more workers")
    monkeypatch.setattr(scoreboard, "references", lambda rung: [("h200", other), *references(rung)])
    assert "2 cores" in elsewhere.verdict(NOISY, "now", "before", "03 more workers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "NVIDIA H200" in elsewhere.verdict(NOISY, "now", "before", "03 more workers")


@pytest.mark.parametrize(
    ("rung", "origin"), [("11 mixed precision", "Recorded on NVIDIA H200"), ("10 channels_last", "Calculated for A100")]
)
def test_without_a_gpu_a_change_for_gpus_is_followed_by_its_gain_on_one(without_gpu, rung, origin):
    own, other = elsewhere.verdict(compared(90, 91, 92, before=[100] * 3), "now", "before", rung).splitlines()
    assert "slower" in own and other.startswith(f"{origin}: {rung}, 1.")


@pytest.mark.parametrize("clear", [True, False])
def test_without_a_gpu_a_noisy_change_for_gpus_is_followed_by_a_cpus_clear_gain_and_by_a_gpus(
    without_gpu, monkeypatch, clear
):
    references = scoreboard.references
    row, processor = recorded("cpu-2-cores", "06 packed in one file")
    row = replace(row, rung="10 channels_last", ratio=row.ratio if clear else NOISY.ratio("now"))
    monkeypatch.setattr(
        scoreboard, "references", lambda rung: [("cpu-2-cores", row)] if rung[:2] == "10" else references(rung)
    )
    own, *cpu, gpu = elsewhere.verdict(NOISY, "now", "before", "10 channels_last").splitlines()
    assert own == NOISY.verdict("now") and gpu.startswith("Calculated for A100: 10 channels_last, 1.")
    assert len(cpu) == clear and all(line.startswith(f"Recorded on {processor}: 10 channels_last, ") for line in cpu)


def test_on_a_gpu_a_noisy_change_for_gpus_is_never_followed_by_a_cpus_gain(without_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    own, other = elsewhere.verdict(NOISY, "now", "before", "10 channels_last").splitlines()
    assert own == NOISY.verdict("now") and other.startswith("Calculated for A100: 10 channels_last, ")


def test_rungs_that_are_calculated_are_rungs_of_notebooks():
    notebooks = "".join(path.read_text(encoding="utf-8") for path in execute.all_notebooks())
    assert [rung for rung in pairs._CALCULATED if f'add(\\"{rung}\\"' not in notebooks] == []


def test_what_kernels_do_is_recorded_and_calculated_in_the_same_classes(tmp_path, without_gpu):
    recorded, usual, compiled = elsewhere.kernel_classes(tmp_path).values()
    both = pd.DataFrame({"recorded": recorded, "calculated": usual}).dropna()
    assert len(both) > 3 and both.sum().max() < 1.1 * both.sum().min()
    moving, fewer = (each.drop("products and convolutions").sum() for each in (usual, compiled))
    assert fewer < moving and compiled["products and convolutions"] == usual["products and convolutions"]


@pytest.mark.slow
def test_what_is_calculated_is_near_what_others_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    table = elsewhere.calculated_and_measured().set_index("change")
    recorded = table[table.index.str.endswith("recorded")]
    assert len(recorded) and (abs(recorded - 1) < 0.1).all(axis=None), recorded
    table = table.drop(recorded.index)
    speeds = np.exp(abs(np.log(table[["before", "after"]].to_numpy()))).ravel()
    gains = np.exp(abs(np.log(table["gain"])))
    assert statistics.median(speeds) < 1.10 and sorted(speeds)[-2] < 4 / 3, table  # the worst: float32 in channels_last
    assert statistics.median(gains) < 1.10 and max(gains) < 4 / 3, table


def test_a_loader_is_compared_with_what_a_gpu_takes():
    said = simulate.feeds(459)  # of an A100 0.4992: that is written as 0.5, which are two
    assert "0.5 of an A100 (920 images/s, about 2 such loaders)" in said and "an H100 (1,786 images/s, about 4" in said
    assert "1 times the demand of an H100 (1,786 images/s)" in simulate.feeds(1_804)
