"""Recorded loops, judged by today's rules, and some of them run here."""

import examine
import pytest

from stepscope import thresholds

# Loops of all kinds; each takes some ten seconds
LIVE = (
    "zip_opened_for_each_item", "concatenated_one_by_one", "arrays_through_the_queue", "confusion_counted_one_by_one",
    "validated_in_each_step", "words_as_one_hot_vectors", "distances_by_broadcasting", "first_batch_of_a_new_iterator",
    "curve_drawn_after_each_batch", "network_in_float64", "copies_and_histograms", "cells_and_text_files",
    "plain_mlp", "checkpointing",
)  # fmt: skip


def test_the_recorded_loops_are_judged_as_accuracy_says():
    rows = list(map(examine.judged, examine.recorded()))
    (said,) = examine.TABLES.findall(examine.ACCURACY.read_text(encoding="utf-8"))
    assert examine.tables(rows) == said, "python stepscope/tests/examination/examine.py shows what has changed"
    assert rows


def test_a_changed_threshold_changes_judgements(monkeypatch):
    before = list(map(examine.judged, examine.recorded()))
    monkeypatch.setattr(thresholds, "INEXACT", 0.1)
    after = list(map(examine.judged, examine.recorded()))
    widths = [[row["range"][1] - row["range"][0] for row in rows if row["range"]] for rows in (before, after)]
    assert sum(widths[0]) < sum(widths[1])
    assert before != after


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_the_first_finding_names_the_fault_or_there_is_none(name):
    row = examine.judged(examine.live(name, truth=False))
    assert row["right"] or row["verdict"] == "unknown", row
