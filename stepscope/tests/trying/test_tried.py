"""Tests of what follows from the runs of a script: pure functions of reports."""

import json
import math

import jsonschema
import pytest
import torch

from stepscope import trying
from stepscope.cli import main
from stepscope.observe.samples import Samples
from stepscope.trying import offered, results
from stepscope.trying import runs as trying_runs
from stepscope.trying.results import Trials, Tried
from stepscope.trying.runs import Runner

SEEN = {
    "loader": {"workers": 0, "prefetch": None, "pinned": False, "persistent": False, "stream": False,
               "in_order": True, "context": "fork", "kind": "DataLoader",
               "line": "t.py:3: loader = DataLoader(images)"},
    "optimizers": [{"name": "AdamW", "line": "t.py:5: optimizer = AdamW(weights)", "fused": True}],
    "device": "cpu", "capability": None, "dtype": "float32", "images": False, "threads": 4, "cores": 4,
    "deterministic": False, "anomaly": False, "benchmark": False, "tf32": False, "whole_epochs": False,
    "network": "Sequential", "autocasts": False, "here": 1,
    "networks": [], "steps": 10, "losses": [2.0, 1.0], "memory_bytes": 1e9, "waits": [0.5], "durations": [1.0],
}  # fmt: skip


def runs(*seconds, **other):
    return tuple(SEEN | {"seconds": each} | other for each in seconds)


def tried(name, change, *seconds, **other):
    loader = SEEN["loader"] | {"workers": change.get("loader", {}).get("num_workers", 0)}
    return Tried(name, change, runs(*seconds, **{"loader": loader} | other))


BASE = tried("as it is", {}, 1.0, 1.02, 0.99, 1.01)
FUSED = tried("fused=True", {"optimizer": {"fused": True}}, 0.8, 0.81, 0.79, 0.8)


def workers(number, *seconds):
    return tried(f"num_workers={number}", {"loader": {"num_workers": number}}, *seconds)


def test_the_smallest_number_of_workers_is_preferred_among_those_that_are_about_as_fast():
    many, few, slow = (
        workers(4, 0.5, 0.51, 0.49, 0.5),
        workers(2, 0.505, 0.51, 0.5, 0.5),
        workers(1, 0.7, 0.7, 0.7, 0.71),
    )
    found = results.faster(BASE, [slow, many, few, FUSED])
    assert [each.name for each in found[:2]] == ["num_workers=2", "num_workers=4"]
    assert [each.name for each in results.without_conflicts(found)] == ["num_workers=2", "fused=True"]


def test_what_is_not_surely_faster_is_not_recommended():
    same = workers(2, 1.0, 1.01, 0.99, 1.02)
    noisy = tried("threads", {"torch": {"threads": 2}}, 0.5, 1.4, 0.7, 1.2)
    found = Trials(BASE, (same, noisy), 4)
    assert found.recommended is None and str(found).endswith("Nothing to change: no setting is surely faster.")


def test_the_settings_together_are_recommended_only_if_they_gain_more_than_the_best_alone():
    best = workers(2, 0.5, 0.5, 0.51, 0.5)
    for seconds, name in ((0.4, "together"), (0.6, "num_workers=2")):
        change = offered.joined([best.change, FUSED.change])
        both = tried("together", change, *(seconds * each for each in (1.0, 1.01, 0.99, 1.0)))
        found = Trials(BASE, (best, FUSED), 4, last=(BASE, best, both))
        assert found.recommended.name == name
    assert "DataLoader(…, num_workers=2)  # t.py:3\n" in f"{found}\n"
    assert Trials(BASE, (best, FUSED), 4).recommended.name == "num_workers=2"


def test_the_last_rounds_decide_and_not_the_first():
    lucky = workers(2, 0.5, 0.5, 0.51, 0.5)
    found = Trials(BASE, (lucky, FUSED), 4, last=(BASE, workers(2, 1.0, 0.98, 1.01, 1.0), FUSED))
    assert found.recommended.name == "fused=True" and found.as_json()["settings"][0]["ratio"]["mean"] < 1.03


def test_what_looks_fastest_is_compared_once_more_with_all_that_can_be_joined():
    noisy = tried("bfloat16", {"network": {"autocast": "bfloat16"}}, 0.6, 0.6, 1.2, 0.8)  # not surely faster
    slower = tried("2 threads", {"torch": {"threads": 2}}, 1.0, 1.01, 1.0, 0.99)
    few, many = workers(1, 0.71, 0.7, 0.7, 0.71), workers(2, 0.72, 0.7, 0.69, 0.7)
    assert results.promising(BASE, [slower]) == []
    assert [each.name for each in results.promising(BASE, [slower, noisy, many, few])] == [
        "num_workers=1", "num_workers=2", "together",
    ]  # fmt: skip
    *_, both = results.promising(BASE, [slower, noisy, many, few])
    assert both.change == {"loader": {"num_workers": 1}, "network": {"autocast": "bfloat16"}} and not both.runs
    assert not results.narrow(BASE, [noisy]) and results.narrow(BASE, [BASE])


class Sleeping(Runner):
    """Reports a loop whose step takes as long as given for each setting, by name of the change."""

    def __init__(self, **seconds):
        super().__init__(minutes=10)
        self.seconds, self.seen = seconds, []

    def run(self, change, steps, checks=False):
        name = " and ".join(sorted(key for values in change.values() for key in values)) or "usual"
        self.seen.append(name)
        loader = SEEN["loader"] | {"workers": change.get("loader", {}).get("num_workers", 0)}
        return SEEN | {"seconds": self.seconds.get(name, 1.0), "loader": loader, "images": True, "networks": ["Net"]}

    def say(self, text): ...


def test_settings_that_gain_alone_are_tried_together_in_new_rounds_until_these_tell_enough():
    runner = Sleeping(fused=0.5, channels_last=0.8, **{"channels_last and fused": 0.4})
    found = trying_runs.tried(runner, ["fused", "channels_last"], 12, None, "The loop")
    assert found.recommended.change == {"optimizer": {"fused": True}, "network": {"channels_last": True}}
    first = 1 + 3 * 3  # the script as it is, and three rounds of three settings
    assert found.rounds == 3 and len(runner.seen) == first + 2 * 4  # equal times: two rounds suffice
    nothing = Sleeping()
    assert trying_runs.tried(nothing, ["fused", "channels_last"], 12, None, "The loop").recommended is None
    assert len(nothing.seen) == first


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([2.0, 1.0], "the same losses"),
        ([2.001, 1.0], "losses differ by 0.033%"),
        ([2.4, 1.4], "learns something else: losses differ by 27%"),
        ([math.nan, 1.0], "learns something else: losses are not finite"),
    ],
)
def test_the_losses_of_a_setting_are_compared_with_those_of_the_script_as_it_is(losses, said):
    found = results.judged(tried("x", {}, 0.5, losses=losses), BASE, [])
    assert said in (found.problem or found.learns)


def test_runs_that_differ_by_themselves_allow_a_setting_to_differ_as_much():
    base = Tried("as it is", {}, (*runs(1.0), *runs(1.0, losses=[2.3, 1.3])))
    assert not results.judged(tried("x", {}, 1.0, losses=[2.4, 1.4]), base, []).problem


def test_in_the_first_round_the_control_shows_how_the_scripts_own_losses_differ():
    base = tried("as it is", {}, 1.0)
    other = tried("x", {}, 1.0, losses=[2.4, 1.4])
    assert (
        results.judged(other, base, []).problem
        and not results.judged(other, base, runs(1.0, losses=[2.3, 1.3])).problem
    )


def test_a_setting_that_another_loader_has_is_not_recommended():
    ignored = Tried("num_workers=4", {"loader": {"num_workers": 4}}, runs(0.5))  # the script's loader has no workers
    assert "could not be applied" in results.judged(ignored, BASE, []).problem


def test_settings_that_can_gain_next_to_nothing_are_left_out_unless_they_are_asked_for():
    gpu = SEEN | {"device": "cuda", "capability": [8, 0]}
    computes, waits = gpu | {"waits": [0.01]}, gpu | {"waits": [0.99]}
    assert "num_workers=4" not in offered.candidates(computes) and "TF32" in offered.candidates(computes)
    assert "num_workers=4" in offered.candidates(waits) and "TF32" not in offered.candidates(waits)
    assert "num_workers=4" in offered.candidates(computes, ["workers"])
    assert "waits for batches for 1.0% of its time" in offered.left_out(computes)[1]


@pytest.mark.parametrize(
    "change", [{"in_order": False}, {"multiprocessing_context": "forkserver"}, {"persistent_workers": True}]
)
def test_every_argument_of_the_loader_is_checked(change):
    assert "could not be applied" in results.judged(Tried("x", {"loader": change}, runs(1.0)), BASE, []).problem


def report_of(*batches):
    """Return what is reported of an epoch with these batches, numbers and texts."""
    samples, loader = Samples(), object()
    for numbers in batches:
        samples.add(loader, {"images": torch.tensor(numbers), "names": [f"{number}.png" for number in numbers]})
    return samples.report(loader)


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([[2, 3], [0, 1]], ""),  # in another order
        ([[0, 2], [1, 3]], ""),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], "8 samples in an epoch in place of 4"),
        ([[0, 1], [2, 4]], "other samples in an epoch, perhaps by random transforms"),
    ],
)
def test_an_epoch_with_other_workers_must_have_the_same_samples(batches, says):
    found = results.other_samples(report_of([0, 1], [2, 3]), report_of(*batches))
    assert found.startswith(says) and bool(found) == bool(says)


def test_the_results_of_the_command_are_written_as_the_schema_describes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = Trials(BASE, (FUSED, Tried("torch.compile", {"network": {"compile": True}}, problem="fails")), 4)
    monkeypatch.setattr(trying, "run", lambda script, **options: found)
    assert main(["try", "--json", "tried.json", "train.py", "--epochs", "1"]) == 0
    assert "fused=True" in capsys.readouterr().out
    written = json.loads((tmp_path / "tried.json").read_text())
    jsonschema.validate(written, json.loads(results.SCHEMA.read_text()))
    assert written["script"] == "train.py --epochs 1" and written["rounds"] == 4
    fused, _ = written["settings"]
    assert (fused["name"], fused["change"]) == ("fused=True", {"optimizer": {"fused": True}})


def test_an_unknown_group_of_settings_is_refused_with_all_that_are_known(capsys):
    with pytest.raises(SystemExit):
        main(["try", "--settings", "workers,speed", "train.py"])
    assert "found speed" in capsys.readouterr().err.replace("\n", " ")


def test_few_rounds_are_said():
    one = Trials(tried("as it is", {}, 1.0, 1.0), (tried("x", {}, 0.5, 0.5),), 2)
    assert "Only 2 rounds fitted into the time" in str(one) and "Only" not in str(Trials(BASE, (FUSED,), 4))


def test_one_slow_run_ends_no_setting_and_two_do():
    one, two = workers(2, 2.0), workers(2, 2.0, 1.6)
    assert not results.judged(one, BASE, []).problem
    assert "slower, 0.64× at best in 2 rounds" in results.judged(two, BASE, []).problem
    assert not results.judged(workers(2, 2.0, 1.0), BASE, []).problem


def test_a_change_of_the_network_that_met_no_network_is_told():
    assert "could not be applied" in results.judged(tried("x", {"network": {"compile": True}}, 1.0), BASE, []).problem


def test_what_is_offered_depends_on_what_the_script_has():
    names = set(offered.candidates(SEEN))
    assert {"num_workers=1", "num_workers=4", "fused=True", "bfloat16"} <= names
    assert not {"channels_last", "torch.compile", "pin_memory=True", "prefetch_factor=4", "TF32"} & names
    shared = offered.candidates(SEEN | {"whole_epochs": True})["num_workers=1, 3 threads"]
    assert shared == {"loader": {"num_workers": 1, "persistent_workers": True}, "torch": {"threads": 3}}
    assert {"num_workers=2, 2 threads", "num_workers=4, 1 thread"} <= names
    assert not any("," in name for name in offered.candidates(SEEN, ["workers"]))
    stream = SEEN | {"loader": SEEN["loader"] | {"stream": True, "workers": 2, "prefetch": 2}}
    assert {"num_workers=1", "prefetch_factor=4"} <= set(offered.candidates(stream))
    amp = offered.candidates(SEEN | {"autocasts": True})
    assert "bfloat16" not in amp and "fused=True" in amp
    ranks = offered.candidates(SEEN | {"here": 2}, ["workers"])
    assert set(ranks) == {"num_workers=1", "num_workers=2"}  # of four cores
    gpu = SEEN | {"device": "cuda", "capability": [8, 0], "images": True}
    assert {
        "TF32",
        "float16",
        "bfloat16",
        "channels_last",
        "cudnn.benchmark",
        "torch.compile",
        "pin_memory=True",
    } <= set(offered.candidates(gpu))
    assert "channels_last" not in offered.candidates(gpu | {"network": "DistributedDataParallel"})
    turing = offered.candidates(gpu | {"capability": [7, 5]})
    assert "float16" in turing and not {"TF32", "bfloat16"} & turing.keys()
    assert set(offered.candidates(SEEN | {"anomaly": True}, ["modes"])) == {"anomaly mode off"}
