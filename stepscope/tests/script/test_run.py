"""Tests of ``stepscope run``: a script runs as without it, and its bottleneck is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from stepscope import results
from stepscope.script import start

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).parent / "train.py"
ALL = 10**6  # steps: it does not end by itself


@pytest.fixture
def run(tmp_path):
    """Run a command below ``stepscope run``; return how it ended, and what it wrote with ``--json``."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.site = 'the own'\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def run(*command, launcher=(), **options):
        options = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "stepscope", "run", "--json", "found.json", *options, *launcher, *command]
        ended = subprocess.run(
            list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        written = tmp_path / "found.json"
        if not written.exists():
            return ended, None
        content = json.loads(written.read_text())
        jsonschema.validate(content, json.loads(results.SCHEMA.read_text()))
        return ended, content["results"]

    return run


def line(fault):
    """Return what a finding shows of the line with this fault."""
    lines = SCRIPT.read_text().splitlines()
    (number,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# fault: {fault}"))
    return f"train.py:{number}:"


def test_the_line_is_named_and_output_and_status_are_those_of_the_script(run, tmp_path):
    alone = subprocess.run([sys.executable, SCRIPT, "slow", "150"], capture_output=True, text=True)
    ended, (found,) = run(SCRIPT, "slow", 150)
    assert (ended.returncode, ended.stdout) == (3, alone.stdout.replace("None", "the own")), ended.stderr
    assert "150 steps of 150 batches" in ended.stdout  # and the weights are the same
    first = found["diagnosis"]["findings"][0]
    assert first["name"] == "items that wait"
    assert first["line"].startswith(line("slow"))
    assert line("slow") in ended.stderr
    assert len([*(tmp_path / "diagnosis").glob("*.pt.trace.json.gz")]) == 1


@pytest.mark.slow
def test_batches_that_validate_are_work_of_the_step_and_those_that_accumulate_are_one_step(run):
    ended, (found,) = run(SCRIPT, "validates", ALL, then="stop", steps=5)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    first = found["diagnosis"]["findings"][0]
    assert first["name"] == "the step does something else"
    assert line("validates") in first["line"]
    assert "batch_size=32, num_workers=1" in found["diagnosis"]["evidence"]["DataLoader"]


@pytest.mark.slow
def test_what_is_done_between_short_epochs_is_named_with_its_line(run):
    _, (found,) = run(SCRIPT, "apart", 200, steps=10)
    first = found["diagnosis"]["findings"][0]
    assert first["name"] == "work between the epochs" and first["line"].startswith(line("apart")), found
    assert "epoch of 20 steps" in first["evidence"]
    assert max(found["diagnosis"]["steps_ms"]) < 400  # it is no part of a step


@pytest.mark.slow
def test_a_loop_that_is_watched_is_diagnosed_in_the_same_way(tmp_path):
    script = SCRIPT.read_text().replace("else loader:", "else stepscope.watch(loader, steps=5):")
    (tmp_path / "train.py").write_text(f"import stepscope; {script}")
    ended = subprocess.run(
        [sys.executable, "train.py", "slow", "300"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert (ended.returncode, ended.stdout[:10]) == (3, "300 steps "), ended.stderr
    assert ended.stderr.count("Verdict: ") == 1 and line("slow") in ended.stderr
    assert len([*(tmp_path / "diagnosis").glob("*.pt.trace.json.gz")]) == 1


@pytest.mark.slow
def test_a_loop_without_a_dataloader_is_one_of_an_optimizers_steps(run):
    ended, (found,) = run(SCRIPT, "own", 150, steps=5)
    assert (ended.returncode, ended.stdout[:10]) == (3, "150 steps "), ended.stderr
    first = found["diagnosis"]["findings"][0]
    assert first["name"] == "the step does something else"
    assert first["line"].startswith(line("own"))


@pytest.mark.slow
def test_each_rank_of_a_job_is_diagnosed_and_all_together(run, tmp_path):
    ended, found = run(SCRIPT, "ranks", 100, launcher=["torchrun", "--nproc-per-node", 2], steps=5)
    assert ended.returncode == 1  # torchrun's, of scripts that end with 3
    findings = [(each["rank"], each["diagnosis"]["findings"][0]["name"]) for each in found[:2]]
    assert findings == [(0, "items that wait"), (1, "items that wait")]
    assert (found[2]["rank"], len(found)) == (None, 3)  # all together
    assert "All ranks together. Verdict: " in ended.stderr
    assert sorted(path.name[:7] for path in (tmp_path / "diagnosis").iterdir()) == ["rank_0.", "rank_1."]


def test_a_script_without_a_loop_and_one_that_ends_too_early_are_told_what_was_seen(run, tmp_path):
    (tmp_path / "site" / "sitecustomize.py").write_text("import torch\nraise ValueError('of the own')\n")
    ended, (found,) = run(SCRIPT, "none", 10)
    assert ended.returncode == 3 and "of the own" in ended.stderr
    assert "10 batches, 10 steps of optimizers" in found["problem"]
    (tmp_path / "other.py").write_text("print('done')")
    ended, (found,) = run("other.py")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert "Nothing was seen" in ended.stderr and "Nothing was seen" in found["problem"]


@pytest.mark.parametrize(
    ("command", "options", "problem"),
    [
        ([], {}, "which script?"),
        (["-m"], {}, "which script?"),
        (["nowhere"], {}, "no such program"),
        (["x.py"], {"steps": 0}, "1 or more, found 0"),
    ],
)
def test_what_cannot_be_run_is_one_line(run, command, options, problem):
    ended, found = run(*command, **options)
    assert ended.returncode in (1, 2) and found is None
    assert problem in ended.stderr and "Traceback" not in ended.stderr


def test_other_files_in_the_folder_of_the_profile_are_kept(run, tmp_path):
    (tmp_path / "diagnosis").mkdir()
    (tmp_path / "diagnosis" / "notes.txt").touch()
    ended, found = run(SCRIPT, "none", 10)
    assert (ended.returncode, ended.stdout, found) == (1, "", None)
    assert "notes.txt" in ended.stderr and (tmp_path / "diagnosis" / "notes.txt").exists()


def test_a_module_runs_with_its_package_and_its_arguments(run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "own.py").write_text("import sys")
    (tmp_path / "package" / "train.py").write_text("from .own import sys\nprint(sys.argv[1:])\nsys.exit(7)")
    ended, _ = run("-m", "package.train", "--steps", "3", "-m", "--", "x")
    assert (ended.returncode, ended.stdout) == (7, "['--steps', '3', '-m', '--', 'x']\n"), ended.stderr


TRAINS = """import itertools, multiprocessing, os, torch
from torch.utils.data import DataLoader
data, number = torch.arange(1280.0).view(320, 4) / 1280, itertools.count()
def train(data, each=lambda: None, loader=DataLoader):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-7)
    for batch in itertools.chain.from_iterable([loader(data, 8)] * 6):
        each()
        model(batch).sum().backward()
        optimizer.step()
    print(model.weight.sum().item())
"""
BESIDES = {
    "profiles some steps": """def each():
    if next(number) % 14 == 13:
        with torch.profiler.profile(): torch.ones(1)
train(data, each)""",
    "warms its profiler up": """scheduled = torch.profiler.schedule(wait=6, warmup=10, active=3, repeat=1)
with torch.profiler.profile(schedule=scheduled) as profiler: train(data, profiler.step)""",
    "starts a process in its dataset": """def produce(queue):
    for row in data.tolist(): queue.put(row)
class Produced(torch.utils.data.IterableDataset):
    def __iter__(self):
        queue = multiprocessing.Queue()
        multiprocessing.Process(target=produce, args=(queue,), daemon=True).start()
        return (torch.tensor(queue.get()) for _ in data)
train(Produced())""",
    "closes all files": "train(data, lambda: next(number) or os.closerange(3, 256))",
    "has an iterator of its own, and prints": """class Own(DataLoader):
    def _get_iterator(self): return (each for each in super()._get_iterator())
class Printing(list):
    def __getitem__(self, index): return print("item", flush=True) or super().__getitem__(index)
train(Printing(data), loader=Own)""",
}


@pytest.mark.parametrize("does", BESIDES)
def test_whatever_a_script_does_beside_its_training_it_ends_and_prints_as_without(run, tmp_path, does):
    (tmp_path / "besides.py").write_text(TRAINS + BESIDES[does])
    alone = subprocess.run([sys.executable, "besides.py"], cwd=tmp_path, capture_output=True, text=True)
    ended, (found,) = run("besides.py", steps=5)
    assert (alone.returncode, ended.returncode, ended.stdout) == (0, 0, alone.stdout), ended.stderr
    assert "diagnosis" in found or "runs a profiler itself" in found["problem"], found


def test_what_a_script_writes_into_the_folder_of_the_profile_is_kept(tmp_path, capsys):
    recorded, folder = tmp_path / "reports" / "traces", tmp_path / "diagnosis"
    recorded.mkdir(parents=True)
    (recorded / "script.1.pt.trace.json").touch()
    start._show([{"rank": 0, "ranks": 1, "text": "Verdict: loading."}], tmp_path / "reports", folder, None)
    (folder / "checkpoint.pt").touch()
    start._show([{"rank": 0, "ranks": 1, "text": "Verdict: loading."}], tmp_path / "reports", folder, None)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "script.1.pt.trace.json"]
    said = capsys.readouterr().err
    assert said.count("Verdict: loading.") == 2 and said.count("found checkpoint.pt in it") == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getppid(), signal.SIGUSR1); os.kill(os.getppid(), signal.SIGHUP); sys.exit(7)", 7),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 143),
    ],
)
def test_a_status_is_that_of_the_script_and_an_earlier_recording_stays(run, tmp_path, script, status):
    (tmp_path / "train.py").write_text(f"import os, signal, sys, time\n{script}")
    (tmp_path / "diagnosis").mkdir()
    (tmp_path / "diagnosis" / "earlier.1.pt.trace.json").touch()
    (tmp_path / "found.json").mkdir()
    (tmp_path / "found.json" / "own").touch()
    ended = subprocess.run(
        [sys.executable, "-m", "stepscope", "run", "--json", "found.json", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == status, ended.stderr
    assert "or a signal" in ended.stderr and "found.json" in ended.stderr and "Traceback" not in ended.stderr
    assert (tmp_path / "diagnosis" / "earlier.1.pt.trace.json").exists()


def test_the_ranks_of_one_machine_are_waited_for_and_no_others(tmp_path):
    for rank in (2, 3):
        assert start._complete(tmp_path) == []
        report = {"rank": rank, "ranks": 4, "here": 2, "diagnosis": {}}
        (tmp_path / f"{rank}.json").write_text(json.dumps(report))
    assert [report["rank"] for report in start._complete(tmp_path)] == [2, 3]
