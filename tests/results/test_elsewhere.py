"""A rung elsewhere: calculated and published figures beside those measured here, and held against each other."""

import re
import statistics

import numpy as np
import pytest
import torch

from helpers import simulate
from helpers.results import elsewhere


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


def test_each_figure_of_a_rung_is_named_by_how_it_was_obtained(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    page = elsewhere.show("10").to_html()
    kinds = re.findall(r">(calculated|measured here|recorded|published)<", page)
    assert kinds[0] == "calculated" and kinds.count("recorded") == 1 and kinds.count("published") == 5
    assert "decided by memory" in page and 'href="https://github.com/huggingface/pytorch-image-models' in page
    assert page.index("ViT") < page.index("ResNet-18") < page.index("1.47×")  # the smallest gain first


@pytest.mark.slow
def test_what_is_calculated_is_near_what_others_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    table = elsewhere.calculated_and_measured().set_index("change")
    recorded = table[table.index.str.endswith("recorded")]
    assert len(recorded) and (recorded.max(axis=1) < 1.5).all() and (recorded.min(axis=1) > 1).all(), recorded
    table = table.drop(recorded.index)
    speeds = np.exp(abs(np.log(table[["before", "after"]].to_numpy()))).ravel()
    gains = np.exp(abs(np.log(table["gain"])))
    assert statistics.median(speeds) < 1.10 and max(speeds) < 4 / 3, table
    assert statistics.median(gains) < 1.05 and max(gains) < 1.15, table


def test_a_loader_is_compared_with_what_a_gpu_takes():
    said = simulate.feeds(459)  # of an A100 0.4992: that is written as 0.5, which are two
    assert "0.5 of an A100 (920 images/s, about 2 such loaders)" in said and "an H100 (1,786 images/s, about 4" in said
    assert "1 times the demand of an H100 (1,786 images/s)" in simulate.feeds(1_804)
