"""Tests of `stepscope.facts.saving`: facts come back as they were, damaged files are refused, nothing is private."""

import copy
import json
import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from support import generated, rank_traces
from support.made_facts import DEVICE, IDLE, NO_PARTS, of_job, of_loop
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stepscope import diagnosis, rules
from stepscope.cli import main
from stepscope.facts import Facts, saving
from stepscope.facts.batches import Batch
from stepscope.facts.hazards import Compilation, Growth, Objects
from stepscope.facts.host import Calls, Host, Operator, Work
from stepscope.facts.job import LATE_IN, Exchanges, Job
from stepscope.facts.loader import REST, Irregular
from stepscope.facts.trials import Trial, Trials

SCHEMA = jsonschema.Draft202012Validator(json.loads(saving.SCHEMA.read_text(encoding="utf-8")))
PRIVATE = "a secret of the environment"
VALUE = 12345.678  # of each tensor


def full_facts():
    """Return facts in which every part is known."""
    calls = Calls(0.3, (Operator("aten::add_", 120.0),), 5.0, "train.py:7: add()", 0.2)
    facts = of_loop(
        34, 24, host=Host(calls, calls, 0.1, outside=Work(0.1, 3.0, 0.05, "train.py:9"), sampled_ms=40.0),
        trials=Trials(1, 8, 2, Trial(10, 4, True)), parts=NO_PARTS | {REST: 1.0}, waits={REST: 0.5},
        irregular=Irregular(1, 0.2, 0.1, 0.5, 9.0, "7"), lines={REST: "train.py:3"},
    )  # fmt: skip
    growth = Growth(3e6, 20, (Objects("Photos.names", 200_000),))
    compilation = Compilation(3, 2.5, "train.py:7", "size mismatch", 8, ("train.py:9",))
    loader = replace(facts.loader, generators=("Photos.numbers",), growth=growth)
    profile = replace(facts.profile, timed=((1.0, 40.0), (2.0, 41.0)), settings=("with_stack",))
    loop = replace(facts.loop, steps=facts.loop.steps[-2:], line="train.py:5: next()")
    batch = Batch(0.7, 128, 100, "input_ids")
    return Facts(profile, facts.host, DEVICE, loop, loader, facts.machine, facts.trials, compilation, batch=batch)


def full_job():
    """Return facts of a job in which every part is known."""
    small, buffers = Exchanges(200.0, 10.0, ("all_gather",), 1e6, 5e3, 5e3), Exchanges(1.0, 5.0)
    late = dict(straggler="rank 1", late_ms=20.0, late_in="loading", late_longer_ms=15.0)
    return of_job(transfer=20.0, small=small, buffers=buffers, unequal=("An all_reduce lacks rank 0.",), **late)


def anything(hint, name=""):
    """Return values of any kind for the type of a fact, with all attributes of dataclasses."""
    kind, inside = get_origin(hint), get_args(hint)
    if hint is float:
        return some.floats(min_value=0.0, exclude_min=True, allow_infinity=False)
    if hint is int:
        return some.integers(min_value=1)
    if name == "late_in":
        return some.sampled_from(LATE_IN)
    if hint in (str, bool, type(None)):
        return some.from_type(hint)
    if kind is dict:
        keys = {"shares": IDLE, "parts": NO_PARTS}.get(name, ["a", "b"])
        return some.fixed_dictionaries(dict.fromkeys(keys, anything(inside[1])))
    if kind is tuple and inside[1:] == (...,):
        return some.lists(anything(inside[0]), min_size=1, max_size=2).map(tuple)
    if kind is tuple:
        return some.tuples(*map(anything, inside))
    if inside:
        return some.one_of(anything(each) for each in inside)
    return some.builds(hint, **{name: anything(each, name) for name, each in get_type_hints(hint).items()})


@given(some.one_of(anything(Facts), anything(Job)))
def test_facts_that_are_written_and_read_are_unchanged(facts):
    text = json.dumps({"version": saving.VERSION, **saving.as_json(facts)})
    assert saving.of_json(json.loads(text)) == facts


@pytest.mark.parametrize("facts", [full_facts(), full_job(), Facts(problem="No step is marked.")])
def test_a_file_of_facts_holds_them_and_follows_the_schema(tmp_path, facts):
    saving.write(facts, tmp_path / saving.NAME)
    assert saving.read(tmp_path / saving.NAME) == facts
    SCHEMA.validate(json.loads((tmp_path / saving.NAME).read_text()))


def test_the_schema_is_made_from_the_types_of_the_facts():
    assert saving.SCHEMA.read_text(encoding="utf-8") == generated.schema()


def places(content, place=()):
    """Yield the place of each member of an object, and of the first element of each array."""
    inside = content.items() if isinstance(content, dict) else [*enumerate(content)][:1]
    for name, value in inside:
        yield (*place, name)
        if isinstance(value, dict | list):
            yield from places(value, (*place, name))


def mutations(content):
    """Yield contents with one damage each: a member is missing, unknown, unlike a number, or of another type."""
    for *above, last in places(content):
        for damage in ("missing", "unknown", None, "text", 0.5, math.nan, math.inf, True, [], {"a": 1}):
            changed = copy.deepcopy(content)
            inside = changed
            for name in above:
                inside = inside[name]
            if damage == "missing":
                del inside[last]
            elif damage == "unknown" and isinstance(inside, dict):
                inside["another"] = inside[last]
            else:
                inside[last] = damage
            yield changed


@pytest.mark.processes
@pytest.mark.parametrize("facts", [full_facts(), full_job()])
def test_damaged_facts_are_refused_unless_they_follow_the_schema_and_give_a_diagnosis(facts):
    ((name, members),) = json.loads(json.dumps(saving.as_json(facts))).items()
    refused = 0
    for changed in mutations(members):
        content = {"version": saving.VERSION, name: changed}
        try:
            read = saving.of_json(content)
        except (ValueError, TypeError):
            refused += 1
        else:
            assert SCHEMA.is_valid(content)
            rules.diagnose(read)
    assert refused > 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"version": 1}', "damaged"),
        (json.dumps({"version": 1, "facts": {"problem": math.nan}}), "damaged"),
        (json.dumps({"version": 1, "facts": {"another": ""}}), "damaged"),
        ('{"version": 0, "facts": {}}', f"version {saving.VERSION}, found 0"),
        (f'{{"version": {saving.VERSION}, "facts": {{}}, "job": {{}}}}', "damaged"),
    ],
)
def test_a_file_without_facts_is_refused_in_a_line_with_its_name(tmp_path, capsys, content, says):
    file = tmp_path / "other.facts.json"
    file.write_text(content)
    with pytest.raises(saving.FactsError, match=rf"other\.facts\.json.*{says}"):
        diagnosis.of_facts(file)
    assert main(["diagnose", str(file)]) == 1
    assert "FactsError" in capsys.readouterr().out


class Unreadable(Dataset):
    """Images that only workers can load: elsewhere the error names a path below a home."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if get_worker_info() is None:
            raise OSError("cannot open '/home/ada/private/photos/1.png', nor /home/ada/private/2.png")
        return torch.full((4,), VALUE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder of a loop that was diagnosed, and its diagnosis."""
    folder = tmp_path_factory.mktemp("loop") / "diagnosis"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVATE", PRIVATE)
        return folder, diagnosis.diagnose(DataLoader(Unreadable(), 4, num_workers=1), torch.sum, steps=5, folder=folder)


@pytest.mark.processes
def test_a_file_of_facts_of_a_run_holds_no_path_no_variable_and_no_values(recorded):
    folder, found = recorded
    text = (folder / saving.NAME).read_text()
    assert "photos" not in text and "1.png" in text and "1.png" in found.unknown[0]  # the error is in it
    assert not re.search(r"[\s\"'(]/\w|[A-Z]:\\", text), "an absolute path"
    assert str(folder.parent) not in text and str(Path.home()) not in text
    assert PRIVATE not in text and str(int(VALUE)) not in text
    SCHEMA.validate(json.loads(text))


@pytest.mark.processes
def test_the_facts_of_a_run_reproduce_its_diagnosis_exactly(recorded, capsys):
    folder, found = recorded
    assert diagnosis.of_facts(folder / saving.NAME) == found
    assert main(["diagnose", str(folder), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["diagnosis"] == found.as_json()
    assert main(["diagnose", str(folder / saving.NAME)]) == 0
    assert textwrap.indent(str(found), "  ") in capsys.readouterr().out


def test_a_folder_of_ranks_is_diagnosed_from_their_facts_the_job_last(tmp_path, capsys):
    """Facts are read instead of traces; other folders below may hold traces only."""
    rank_traces.ddp(traced := tmp_path / "traced")
    facts = diagnosis.facts_of_ranks(traced)
    for number in range(2):
        saving.write(full_facts(), tmp_path / "saved" / f"rank_{number}.{saving.NAME}")
    saving.write(facts, tmp_path / "saved" / saving.JOB)
    assert diagnosis.of_facts(tmp_path / "saved" / saving.JOB) == diagnosis.of_ranks(traced)
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    titles = [each["trace"] for each in json.loads(capsys.readouterr().out)["results"]]
    assert titles[:3] == ["saved, rank_0", "saved, rank_1", "saved, all ranks together"]
    assert len(titles) == 6 and titles[-1].startswith("traced")
