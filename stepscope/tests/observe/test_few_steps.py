"""Scripts that end, or are ended, before their examination: the diagnosis of the steps so far."""

import itertools
import json

import pytest
from support import loops
from torch.utils.data import DataLoader

from stepscope import rules, thresholds
from stepscope.facts import saving
from stepscope.observe import launch

pytestmark = pytest.mark.processes
PROFILED = 4  # steps of a whole examination, by the fixture `quick`


@pytest.fixture
def reports_of(script):
    """The reports on a script that ends after so many steps, each of which waits for two slow items."""

    def reports_of(steps, **workers):
        recorder, optimizer, reports = script(20)
        for _ in itertools.islice(DataLoader(loops.SleepDataset(10_000, 0.005), 2, **workers), steps):
            optimizer.step()
        recorder.end()
        return reports

    return reports_of


def facts_in(report):
    return saving.of_json({"version": saving.VERSION, "facts": report["facts"]})


@pytest.mark.parametrize(("steps", "workers", "profiled"), [(9, 0, 0), (15, 1, 0), (28, 0, 3), (36, 0, PROFILED)])
def test_a_script_that_ends_early_is_diagnosed_by_the_steps_so_far(reports_of, steps, workers, profiled):
    *_, report = reports_of(steps, num_workers=workers)
    facts = facts_in(report)
    stalled = facts.profile is not None and facts.profile.stall_ms > 0  # on a busy machine one is left out
    assert (facts.profile.steps + stalled if facts.profile else 0) == profiled
    assert 4 < facts.loop.wait_ms < 100 and facts.loader.items.count > 0
    found = rules.diagnose(facts)
    assert found.verdict == "loading"
    assert any("few steps" in text for text in found.unknown)


def test_a_script_of_very_few_steps_is_told_how_many_are_needed(reports_of):
    *_, report = reports_of(4)
    assert "4 batches" in report["problem"] and "facts" not in report


def test_what_was_seen_is_reported_meanwhile_for_a_script_that_a_signal_ends(reports_of, monkeypatch, tmp_path):
    monkeypatch.setattr(thresholds, "REPORT_EVERY_S", 0)
    *before, last = reports_of(50)
    assert "problem" in before[0] and "so_far" not in last
    assert all(each["so_far"] for each in before)
    assert len(facts_in(before[-1]).loop.steps) == 20
    for report, complete in ((before[-1], 0), (last, 1)):
        (tmp_path / "0-1.json").write_text(json.dumps(report))
        assert len(launch.complete(tmp_path)) == complete
