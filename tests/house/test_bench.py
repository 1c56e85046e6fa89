"""The benchmark goes on where another library cannot, and says so. What it measures is nobody's test."""

import tomllib

import pytest
import torch
from packaging.requirements import Requirement

from helpers import config
from tests.bench import peers, timing

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 1e-9)
    monkeypatch.setattr(timing, "rest", lambda: None)


def breaks_off():
    yield [1, 2], None
    raise RuntimeError("no\nshard")


def test_the_extra_installs_what_is_compared():
    project = tomllib.loads((config.PROJECT / "pyproject.toml").read_text())["project"]
    extra = {Requirement(wanted).name for wanted in project["optional-dependencies"]["peers"]}
    assert extra | {"numpy"} == {peer.package for peer in peers.PEERS}


def test_a_library_that_fails_is_named_in_one_line_and_the_others_are_timed(capsys):
    ours, theirs = timing.Variant([([1, 2], None)]), timing.Variant(breaks_off, beside="ours")
    rates = timing.interleaved({"ours": ours, "theirs": theirs, "limit": ours})
    assert {name: len(measured) for name, measured in rates.items()} == {"ours": timing.ROUNDS, "limit": timing.ROUNDS}
    assert capsys.readouterr().out == "theirs failed: RuntimeError: no shard\n"


def test_a_failure_of_ours_stops_the_benchmark():
    with pytest.raises(RuntimeError, match="shard"):
        timing.interleaved({"ours": timing.Variant(breaks_off)})


def test_libraries_that_are_not_installed_are_named_in_one_line_with_the_way_to_install_them(monkeypatch, capsys):
    monkeypatch.setattr(peers, "installed", list)
    assert peers.variants(peers.Source([], [], None, {}, None)) == {}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ot installed" in line]
    assert "webdataset" in line and peers.INSTALL in line


def test_the_report_has_the_ratio_of_each_library_to_ours(capsys):
    variants = {"ours": timing.Variant([]), "theirs": timing.Variant([], beside="ours")}
    timing.report_beside({"ours": [300.0, 200.0, 400.0], "theirs": [100.0, 100.0, 100.0]}, variants)
    assert "3.0× (2.0 – 4.0)" in capsys.readouterr().out


def test_a_batch_with_other_labels_is_no_comparison():
    images = torch.zeros(peers.BATCH, *peers.SHAPE, dtype=torch.uint8)
    known = {hash(images[0].numpy().tobytes()): 3}
    peers._check(images, torch.full((peers.BATCH,), 3), known)
    with pytest.raises(ValueError, match="labels"):
        peers._check(images, torch.full((peers.BATCH,), 4), known)
