"""Tests of results as files: their schema, and two runs compared."""

import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from support import cuda_trace, rank_traces
from support.made_results import HOSTILE, found, write

from stepscope import diagnosis, report
from stepscope.base import confidence
from stepscope.cli import main
from stepscope.report.compare import batch_means

SCHEMA = json.loads(report.SCHEMA.read_text())


def of(workers):
    """Return the facts of a loop whose loader has so many workers, as a result has them."""
    return {"facts": {"loop": {"workers": workers}}}


def around(ms, count=20, seed=0):
    chance = random.Random(seed)
    return [chance.gauss(ms, 0.02 * ms) for _ in range(count)]


def test_a_diagnosis_follows_the_schema_and_is_unchanged_when_read(capsys, tmp_path):
    traced = tmp_path / "runs"
    for folder in ("gpu", "job", "bad"):
        (traced / folder).mkdir(parents=True)
    cuda_trace.write(traced / "gpu" / "host_1.10.pt.trace.json")
    rank_traces.write(traced / "job", rank_traces.job([[[50], [60]], [[70], [50]]], 20))
    (traced / "bad" / "x.pt.trace.json").write_text("no trace")
    assert main(["diagnose", str(traced), "--json"]) == 1  # one cannot be read
    (tmp_path / "found.json").write_text(text := capsys.readouterr().out)
    jsonschema.validate(json.loads(text), SCHEMA)
    again = {each["trace"]: each for each in report.read(tmp_path / "found.json")}
    assert [title for title, each in again.items() if "problem" in each] == ["bad"]
    one = diagnosis.of_trace(traced / "gpu")
    read = next(each["diagnosis"] for name, each in again.items() if name.startswith("gpu, "))
    assert str(read) == str(one)
    assert np.array(read.steps) == pytest.approx(np.array(one.steps), abs=1e-4)
    assert len(one.steps) == int(dict(one.evidence)["steps"].split()[0])
    assert "job, 2 ranks together" in again


@pytest.mark.parametrize("lost", ["version", "results", "verdict", "key", "gain", "steps_ms"])
def test_a_file_with_missing_data_violates_the_schema_and_is_refused(tmp_path, lost):
    text = write(tmp_path / "found.json", found(1, 2)).read_text()
    (tmp_path / "less.json").write_text(text.replace(f'"{lost}"', '"other"'))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads((tmp_path / "less.json").read_text()), SCHEMA)
    with pytest.raises(report.ResultError, match=r"less\.json"):
        report.read(tmp_path / "less.json")


def test_results_of_another_version_are_refused_by_their_number(tmp_path):
    path = write(tmp_path / "found.json", found(1, 2))
    path.write_text(path.read_text().replace('"version": 3', '"version": 2'))
    with pytest.raises(report.ResultError, match="version 3, found 2"):
        report.read(path)


@pytest.mark.parametrize(
    ("after", "status", "says"),
    [(10, 0, "no sure difference"), (10.4, 0, "longer"), (11, 1, "longer"), (5, 0, "shorter")],
)
def test_steps_that_are_surely_slower_by_more_than_the_limit_fail(tmp_path, capsys, after, status, says):
    paths = [write(tmp_path / f"{ms}-{seed}.json", found(*around(ms, seed=seed))) for seed, ms in ((1, 10), (2, after))]
    assert main(["compare", *map(str, paths), "--fail-above", "5%"]) == status
    said = capsys.readouterr().out
    assert f"of a step: {says} (" in said
    change = report.compare(*paths).change
    assert change.lowest < after / 10 - 1 < change.highest


@pytest.mark.parametrize("workers", [3, 4, 8])
@pytest.mark.parametrize("count", [24, 25, 100])
def test_the_change_between_two_runs_does_not_depend_on_the_first_step_of_a_period(tmp_path, workers, count):
    """In each period one step waits for 30 ms: the same loop seems changed if steps count one by one."""
    steps = [ms + (30 if number % workers == 0 else 0) for number, ms in enumerate(around(2, 200))]
    for late in range(workers):
        paths = [
            write(tmp_path / f"{begin}.json", found(*steps[begin : begin + count]), **of(workers))
            for begin in (0, 1 + late)
        ]
        compared = report.compare(*paths)
        assert abs(compared.change.mean) < 0.01 and not compared.slower_than(0.0)
        assert compared.change.highest - compared.change.lowest < 0.05
        assert "workers is unknown" not in str(compared)


@pytest.mark.parametrize(("workers", "count", "means"), [(0, 20, 10), (0, 19, 19), (None, 3, 3), (4, 11, 2), (8, 15, 1),
                                                         (8, 5, 1), (4, 400, 10), (4, 399, 11)])  # fmt: skip
def test_steps_are_averaged_over_whole_periods_into_ten_means_or_more(tmp_path, workers, count, means):
    steps = [*range(1, count + 1)]
    after = write(tmp_path / "after.json", found(*steps), **of(workers))
    side = report.compare(after, after).after
    assert len(side.values) == means and side.group * means <= count
    assert side.group % (workers or 1) == 0 or means == 1
    assert side.values[0] == np.mean(steps[: side.group])


def test_a_slow_moment_that_slows_several_steps_is_rarely_called_a_change():
    """Neighbours correlate with 0.5: if steps count one by one, a quarter of all comparisons is wrong."""
    chance = random.Random(0)

    def run():
        late, steps = 0.0, []
        for _ in range(100):
            late = 0.5 * late + chance.gauss(0, 1)
            steps.append(100 + late)
        return steps

    def wrong(values):
        changes = [confidence.change(values(run()), values(run())) for _ in range(400)]
        return sum(change.lowest > 0 or change.highest < 0 for change in changes) / len(changes)

    assert wrong(lambda steps: batch_means(steps, 1)[0]) < 0.1 < 0.2 < wrong(list)


def test_a_run_of_fewer_than_two_periods_has_no_interval_and_never_fails(tmp_path, capsys):
    before = write(tmp_path / "before.json", found(*around(10)), **of(0))
    after = write(tmp_path / "after.json", found(*around(30, 15)), **of(8))
    assert main(["compare", str(before), str(after), "--fail-above", "5%"]) == 0
    assert "time more steps, or more runs" in capsys.readouterr().out


def test_a_single_run_without_the_number_of_workers_says_that_its_interval_may_be_wrong(tmp_path):
    before = write(tmp_path / "before.json", found(*around(10)), **of(2))
    for number in range(2):
        write(tmp_path / "after" / f"{number}.json", found(*around(10)))
    assert "workers is unknown" in str(report.compare(before, tmp_path / "after" / "0.json"))
    assert "workers is unknown" not in str(report.compare(before, tmp_path / "after"))


def test_runs_that_differ_more_than_their_steps_make_the_interval_wider(tmp_path):
    for side, means in (("before", (10, 12, 11)), ("after", (11, 12.5, 10.5))):
        for number, ms in enumerate(means):
            write(tmp_path / side / f"{number}.json", found(*around(ms, seed=number)))
    one = report.compare(tmp_path / "before" / "0.json", tmp_path / "after" / "0.json")
    three = report.compare(tmp_path / "before", tmp_path / "after")
    assert one.change.lowest > 0.05 > three.change.lowest
    assert "One run" in str(one)
    assert "One run" not in str(three) and "without a verdict" not in str(three)
    busy = replace(found(10, 20), verdict="unknown", reason="Other processes had the cores.")
    write(tmp_path / "after" / "3.json", busy)
    assert f"without a verdict: {busy.reason}" in str(report.compare(tmp_path / "before", tmp_path / "after"))


def test_findings_that_are_gone_or_new_and_other_machines_are_listed(tmp_path):
    machine = {"device": "CPU", "cores": 2, "torch": "2.15"}
    before = write(tmp_path / "before.json", found(*around(10)), machine=machine)
    ranks = [found(*around(ms), key="a.late", name="late", line=HOSTILE) for ms in (6, 8)]
    said = str(report.compare(before, write(tmp_path / "after.json", *ranks, machine=machine | {"cores": 4})))
    assert "gone    slow items" in said
    assert "new     late" in said
    assert "8.0 ms a step" in said  # of the slowest rank
    assert "cores 2" in said and "cores 4" in said
    assert "\x1b" not in said


def test_a_finding_is_not_gone_or_new_if_any_rank_of_any_run_has_its_key(tmp_path):
    before = write(tmp_path / "before.json", found(*around(10)), found(*around(8), key="a.late", name="late"))
    for number, key in enumerate(["a.late", "items.slow"]):
        write(tmp_path / "after" / f"{number}.json", found(*around(10), key=key, name="another text"))
    write(tmp_path / "after" / "2.json", found(*around(10), key="a.small", name="hardly worth it", gain=0.01))
    said = str(report.compare(before, tmp_path / "after"))
    assert "gone" not in said and "new " not in said, said


def test_work_between_epochs_counts_for_each_step(tmp_path):
    paths = [write(tmp_path / f"{apart}.json", found(*around(10), apart=apart)) for apart in (0.0, 5.0)]
    assert report.compare(*paths).change.mean == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "expected results as JSON"),
        (report.document("run", [{"problem": "\x1b[2J nothing"}]), "[2J nothing"),
        (report.document("run", [{"diagnosis": found(0, 5e-324).as_json()}]), "expected timed steps"),
        (report.document("run", [{"problem": "It ended too early."}]), "It ended too early."),
        (report.document("diagnose", [{"trace": "a", "problem": "b"}] * 2), "expected one trace, found 2"),
    ],
)
def test_files_that_cannot_be_compared_are_refused_in_a_line(tmp_path, capsys, content, says):
    (tmp_path / "found.json").write_text(content)
    good = write(tmp_path / "good.json", found(1, 2))
    assert main(["compare", str(good), str(tmp_path / "found.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and "found.json" in line and "\x1b" not in line
    assert main(["compare", str(good), str(tmp_path)]) == 1  # one bad file among others is named, too
    assert "found.json" in capsys.readouterr().err
