"""Tests of `stepscope.diagnosis.loading`: what follows from the figures of a loop that loads."""

import dataclasses

import pytest

from stepscope.diagnosis import items, loading, result

NONE = dict.fromkeys([*items.PARTS, loading.REST], 0.0)
ITEMS = loading.Items(100, 1.0, 1.0, 32, NONE | {"decoding": 1.0}, opened=1.0, file_bytes=50e3, slowest="decode")


def known(step, wait, workers, *, usual=None, cores=8, restart=0.0, **facts):
    usual = wait if usual is None else usual
    of_loop = {
        name: facts.pop(name) for name in ("transfer", "queued", "tensors", "pickled", "apart", "cpu") if name in facts
    }
    loaded = dataclasses.replace(ITEMS, **facts)
    return loading.Loading(step, wait, usual, workers, cores, restart + loaded.batch_ms, 1, items=loaded, **of_loop)


def of_loading(**facts):
    return {finding.name: finding for finding in result.findings(loading.RULES, known(**facts))}


QUICK = dict(cores=2, cpu_ms=0.1, ms=0.1)  # items


@pytest.mark.parametrize(
    "facts",
    [
        dict(step=40, wait=0.5, workers=2),
        dict(step=40, wait=0.5, workers=16),
        dict(step=40, wait=0.0, workers=0, ms=0.001),
        dict(step=40, wait=0.5, workers=2, restart=0.5),
        dict(step=20, wait=2.5, workers=4, transfer=2.5),  # a batch has to arrive
        dict(step=40, wait=0.5, workers=30, cpu_ms=0.1),  # they wait for storage, which takes no core
    ],
)
def test_loading_that_keeps_up_is_accused_of_nothing(facts):
    assert of_loading(**facts) == {}


# Facts, what is found in them beside what the items do, its gain, and the workers that are advised.
NUMBERS_OF_WORKERS = {
    "more": (dict(step=34, wait=24, workers=1), "too few workers", 24 / 34, 4),  # 32 ms by 4 is less than the 10 left
    "waiting": (dict(step=34, wait=24, workers=2, cores=2, cpu_ms=0.1), "too few workers", 24 / 34, 4),
    "cores": (dict(step=42, wait=32, workers=0, cores=2), "loading in the loop itself", 26 / 42, 2),
    # All cores work in the step already: what workers do, they cannot
    "crowded": (dict(step=42, wait=32, workers=0, cores=2, cpu=76), "loading in the loop itself", 4 / 42, 2),
    # Five times as long as the items by themselves: the machine is busy
    "busy": (dict(step=170, wait=160, workers=0, cores=2), "loading in the loop itself", 90 / 170, 2),
    "first": (dict(step=8, wait=1.3, workers=0, **QUICK), "loading in the loop itself", 1.3 / 8, 1),
    "too many": (dict(step=40, wait=0.5, workers=17), "too many workers", 0.5 / 40, 8),
    # Each of them starts in each epoch, too
    "restarted": (dict(step=40, wait=0.5, workers=17, restart=20), "too many workers", (0.5 + 20 * 9 / 17) / 60, 8),
    "fewer": (dict(step=40, wait=0.5, workers=17, restart=20), "workers restarted every epoch", 20 / 60, 8),
    "none": (dict(step=12, wait=2, workers=4, ms=0.01, cpu_ms=0.01, transfer=2), "workers slower than none", 0.054, 0),
}


@pytest.mark.parametrize("case", NUMBERS_OF_WORKERS)
def test_the_number_of_workers_is_advised_with_its_gain(case):
    facts, name, gain, workers = NUMBERS_OF_WORKERS[case]
    finding = of_loading(**facts)[name]
    assert finding.gain == pytest.approx(gain, abs=0.001)
    assert f"num_workers={workers})" in finding.change


def test_more_workers_are_not_advised_where_cores_are_lacking_or_to_get_a_batch_from_one_takes_longer():
    assert "loading in the loop itself" not in of_loading(step=12, wait=0.8, workers=0, **QUICK)
    assert "too few workers" not in of_loading(step=34, wait=24, workers=2, cores=2)


def test_workers_are_not_slower_than_none_where_others_have_the_cores():
    found = of_loading(step=184, wait=155, workers=2, cores=2, ms=2.0, cpu_ms=2.0, transfer=2)
    assert "workers slower than none" not in found


def test_what_an_item_waits_and_what_it_works_are_findings_of_their_own():
    parts, waits = NONE | {loading.REST: 1.0}, {loading.REST: 0.75}
    lines = {loading.WAITING: "train.py:3: ask()", loading.REST: "train.py:4: sort()"}
    found = of_loading(step=34, wait=24, workers=2, cores=2, parts=parts, waits=waits, lines=lines)
    assert list(found) == ["items that wait", "the dataset's own work"]
    assert [each.gain for each in found.values()] == pytest.approx([24 / 34, 0.25])
    assert "train.py:3" in found["items that wait"].evidence
    assert "train.py:4" in found["the dataset's own work"].evidence


def test_workers_on_the_cores_that_the_step_needs_are_seen_though_it_does_not_wait():
    facts = dict(step=60, wait=0.5, workers=2, cores=2)  # 32 items of 1 ms: 16 of 60 ms
    assert of_loading(**facts, cpu=40) == {}  # there is a core to spare
    finding = of_loading(**facts, cpu=85)["decoding at every read"]
    assert finding.gain == pytest.approx(16 / 60)
    assert "cores that the step needs" in finding.evidence


def test_items_that_take_no_longer_than_their_calls_are_to_be_loaded_together():
    parts = NONE | {loading.REST: 0.75, "collating": 0.25}
    facts = dict(step=30, wait=20, workers=0, cores=2, ms=0.01, cpu_ms=0.01, batch=2000, parts=parts)
    assert list(of_loading(**facts)) == ["loading in the loop itself", "items one by one"]
    assert "items one by one" not in of_loading(**facts, together=True)


@pytest.mark.parametrize(
    ("facts", "name", "gain"),
    [
        (dict(step=50, wait=8, workers=4, usual=0.2), "irregular loading", 8 / 50),
        (dict(step=50, wait=8, workers=4, transfer=6), "transfer from the workers", 6 / 50),
        (dict(step=50, wait=8, workers=4, transfer=6, tensors=64), "many tensors in a batch", 6 / 50),
        (dict(step=50, wait=8, workers=4, transfer=6, pickled=1e7), "batches through a pipe", 8 / 50),
        (dict(step=40, wait=0.5, workers=2, restart=10), "workers restarted every epoch", 10 / 50),
        (dict(step=40, wait=0.5, workers=2, apart=40), "work between the epochs", 40 / 80),
    ],
)
def test_waits_in_spite_of_fast_workers_are_distinguished(facts, name, gain):
    ((found, finding),) = of_loading(**facts).items()
    assert (found, finding.gain) == (name, pytest.approx(gain))


def test_arrays_that_arrive_more_slowly_than_they_are_made_are_named_before_what_follows_from_them():
    facts = dict(step=80, wait=70, workers=4, transfer=75, pickled=6e6, tensors=128, ms=0.01, batch=100)
    found = result.conclude(80, (), of_loading(**facts).values()).findings
    names = [each.name for each in found]
    assert names == ["batches through a pipe", "many tensors in a batch", "workers slower than none"]


@pytest.mark.parametrize("usual", [0.2, 8])
def test_workers_that_wait_for_a_core_are_no_fault_of_the_loop_and_make_a_verdict_impossible(usual):
    facts = known(step=50, wait=8, workers=4, usual=usual, transfer=0.5, queued=12)
    assert not list(result.findings(loading.RULES, facts))
    assert "12 ms" in loading.doubt(facts)
    assert "not known" in loading.doubt(dataclasses.replace(facts, queued=0.1))


@pytest.mark.parametrize(
    "facts",
    [
        dict(step=50, wait=8, workers=4, transfer=7),
        dict(step=34, wait=24, workers=1),
        dict(step=42, wait=32, workers=0),
    ],
)
def test_a_wait_that_is_explained_is_not_doubted(facts):
    assert loading.doubt(known(**facts)) is None


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("decoding", "decoding at every read"),
        ("resizing", "resizing at every read"),
        ("opening", "many small files"),
        ("reading", "many small files"),
        ("transforming", "transforms of each image"),
        ("collating", "collating item by item"),
        (loading.REST, "the dataset's own work"),
    ],
)
def test_the_part_that_takes_the_time_of_an_item_is_named(part, name):
    facts = dict(step=34, wait=24, workers=2, cores=2, parts=NONE | {part: 1.0})
    assert list(of_loading(**facts)) == [name]
    if part == "reading":
        assert list(of_loading(**facts, file_bytes=20e6)) == ["slow reading"]


def test_what_reads_and_computes_at_one_line_counts_together():
    parts = NONE | {"reading": 0.5, loading.REST: 0.3, "collating": 0.2}
    facts = dict(step=34, wait=24, workers=2, cores=2, parts=parts)
    apart, together = (
        of_loading(**facts, lines={"reading": "train.py:3", loading.REST: line})
        for line in ("train.py:9", "train.py:3")
    )
    assert apart["many small files"].gain == pytest.approx(0.5)
    assert together["many small files"].gain == pytest.approx(24 / 34)
    assert together["the dataset's own work"].gain == apart["the dataset's own work"].gain == pytest.approx(0.3)
