"""Tests of ``stepscope run``: a script runs as without it, and its bottleneck is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from stepscope import run as doors
from stepscope.cli import main
from stepscope.facts import saving
from stepscope.observe import launch
from stepscope.report import documents

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).parent / "train.py"
ALL = 10**6  # steps: it does not end by itself


@pytest.fixture
def execute(tmp_path):
    """Run Python with these arguments in a folder with a `sitecustomize`; return how it ended."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.site = 'the own'\n")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])

    def execute(*arguments):
        command = [sys.executable, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    return execute


@pytest.fixture
def run(execute, tmp_path):
    """Run a command below ``stepscope run``; return how it ended, and what it wrote with ``--json``."""

    def run(*command, **options):
        options = [text for name, value in options.items() for text in (f"--{name}", value)]
        ended = execute("-m", "stepscope", "run", "--json", "found.json", *options, *command)
        written = tmp_path / "found.json"
        if not written.is_file():
            return ended, None
        content = json.loads(written.read_text())
        jsonschema.validate(content, json.loads(documents.SCHEMA.read_text()))
        return ended, content["results"]

    return run


def line(fault):
    """Return how a finding begins to show the line with this fault."""
    lines = SCRIPT.read_text().splitlines()
    (number,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# fault: {fault}"))
    return f"train.py:{number}:"


def first(found):
    """Return key and line of the first finding."""
    finding = found["diagnosis"]["findings"][0]
    return finding["key"], finding["line"]


def test_the_line_is_named_and_output_and_status_are_those_of_the_script(execute, run, tmp_path):
    alone = execute(SCRIPT, "slow", 150)
    ended, (found,) = run(SCRIPT, "slow", 150)
    assert (ended.returncode, ended.stdout) == (alone.returncode, alone.stdout) == (3, alone.stdout), ended.stderr
    assert "150 steps of 150 batches" in ended.stdout and "the own" in ended.stdout  # and the weights are the same
    lines = {finding["key"]: finding["line"] for finding in found["diagnosis"]["findings"]}
    assert lines["items.waiting"].startswith(line("slow"))  # on a busy machine perhaps after "loader.no-workers"
    assert ended.stderr.count("Verdict: ") == 1 and line("slow") in ended.stderr
    (trace,) = (tmp_path / "diagnosis").glob("*.pt.trace.json.gz")
    assert saving.as_json(saving.read(trace.with_name(saving.NAME)))["facts"]["loop"]["epoch_steps"] == 128


@pytest.mark.slow
def test_workers_that_stay_are_not_said_to_be_restarted_where_another_loader_was_tried_first(run, tmp_path):
    (tmp_path / "tries.py").write_text("""
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    data, model = TensorDataset(torch.rand(256, 32), torch.rand(256, 1)), torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train(loader):
        for inputs, targets in loader:
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()

    train(DataLoader(data, 16))
    loader = DataLoader(data, 16, num_workers=1, persistent_workers=True)
    while True:
        train(loader)

main()
""")
    ended, (found,) = run("tries.py", then="stop", steps=10)
    assert ended.returncode == 0, ended.stderr
    assert found["facts"]["loop"]["persistent"] and not found["facts"]["loop"]["loader_changed"]
    assert "loader.workers-restarted" not in [each["key"] for each in found["diagnosis"]["findings"]]


@pytest.mark.slow
def test_a_watched_loop_is_diagnosed_in_the_same_way(execute, tmp_path):
    script = SCRIPT.read_text().replace("else loader:", "else stepscope.watch(loader, steps=5):")
    (tmp_path / "train.py").write_text(f"import stepscope; {script}")
    ended = execute("train.py", "slow", 300)
    assert (ended.returncode, ended.stdout[:10]) == (3, "300 steps "), ended.stderr
    assert ended.stderr.count("Verdict: ") == 1 and line("slow") in ended.stderr
    assert saving.read(tmp_path / "diagnosis" / saving.NAME).loader.items.count > 0


@pytest.mark.slow
def test_validation_is_work_of_the_step_and_accumulated_batches_are_one_step(run):
    ended, (found,) = run(SCRIPT, "validates", ALL, then="stop", steps=5)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    key, place = first(found)
    assert key == "host.other-work-in-steps" and line("validates") in place
    assert found["facts"]["loop"]["epoch_steps"] in (63, 64)  # its first step passes before the loader is known
    assert found["facts"]["loader"]["settings"]["num_workers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "count", "key", "epoch_steps"),
    [("apart", 200, "loop.work-between-epochs", 20), ("own", 150, "host.other-work-in-steps", None)],
)
def test_work_between_epochs_and_own_batches_are_named_with_their_lines(run, fault, count, key, epoch_steps):
    ended, (found,) = run(SCRIPT, fault, count, steps=10)
    assert (ended.returncode, ended.stdout[:10]) == (3, f"{count} steps "), ended.stderr
    assert first(found)[0] == key and first(found)[1].startswith(line(fault)), found
    assert found["facts"]["loop"]["epoch_steps"] == epoch_steps
    assert max(found["diagnosis"]["steps_ms"]) < 400  # a pause is no part of a step


@pytest.mark.slow
def test_each_rank_of_a_job_is_diagnosed_and_all_together(run, tmp_path):
    ended, found = run("torchrun", "--nproc-per-node", 2, SCRIPT, "ranks", 100, steps=5)
    assert ended.returncode == 1  # torchrun's, of scripts that end with 3
    assert [(each["rank"], first(each)[0]) for each in found[:2]] == [(0, "items.waiting"), (1, "items.waiting")]
    assert (found[2]["rank"], len(found)) == (None, 3)  # all together
    assert "All ranks together. Verdict: " in ended.stderr
    names = {path.name for path in saving.of_folder(tmp_path / "diagnosis")}
    assert names == {saving.JOB, f"rank_0.{saving.NAME}", f"rank_1.{saving.NAME}"}


SPAWNS = """import sys, torch
from torch.utils.data import DataLoader
data = torch.ones(20_000, 4)
def rank(number, count):
    torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=number, world_size=count)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-7)
    for step, batch in zip(range(int(sys.argv[2])), DataLoader(data, 8)):
        model(batch).sum().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
if __name__ == "__main__":
    next(iter(DataLoader(data, 8)))
    torch.multiprocessing.spawn(rank, args=(2,), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "results"), [(8, 2), (100, 3)])
def test_processes_that_a_script_spawns_are_the_ranks_of_one_job(run, tmp_path, steps, results):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    ended, found = run("spawns.py", f"file://{tmp_path}/store", steps, steps=5)
    found = [each for each in found if "diagnosis" in each]
    assert [each["rank"] for each in found] == [0, 1, None][:results], ended.stderr
    assert all(f"Rank {number}. Verdict: " in ended.stderr for number in (0, 1))
    assert ("All ranks together. Verdict: " in ended.stderr) == (results == 3)


def test_the_batches_and_steps_of_a_script_with_too_few_steps_are_reported(run, tmp_path):
    (tmp_path / "site" / "sitecustomize.py").write_text("import torch\nraise ValueError('of the own')\n")
    ended, (found,) = run(SCRIPT, "none", 4)
    assert ended.returncode == 3 and "of the own" in ended.stderr
    assert "4 batches, 4 steps of optimizers" in found["problem"]
    (tmp_path / "other.py").write_text("print('done')")
    ended, (found,) = run("other.py")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert "Nothing was seen" in ended.stderr and "Nothing was seen" in found["problem"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ([], "which script?"),
        (["-m"], "which script?"),
        (["nowhere"], "no such program"),
        (["nowhere.py"], "no such script"),
        (["nowhere.ipynb"], "no such script"),
        (["site"], "found a folder"),
        (["site/sitecustomize.sh"], "with bash"),
        (["--steps", "0", "x.py"], "1 or more, found 0"),
        (["--folder", "site", "x.py"], "sitecustomize.py"),  # which a profile would replace
        (["--json", "results/found.json", "x.py"], "results: no such folder"),
        (["--json", "site", "x.py"], "found a folder"),
    ],
)
def test_a_command_that_cannot_run_is_refused_in_one_line(tmp_path, monkeypatch, capfd, command, problem):
    (tmp_path / "site").mkdir()
    for name in ("sitecustomize.py", "sitecustomize.sh"):
        (tmp_path / "site" / name).touch()
    (tmp_path / "x.py").write_text("print('it ran')")
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["run", *command])
    except SystemExit as ended:
        status = ended.code
    printed = capfd.readouterr()
    assert status in (1, 2) and problem in printed.err and printed.out == ""
    assert (tmp_path / "site" / "sitecustomize.py").exists()


@pytest.mark.slow
def test_a_script_that_a_signal_ends_is_diagnosed_by_the_steps_so_far(run, tmp_path):
    text = SCRIPT.read_text().replace("time.sleep(0.0005)", "time.sleep(0.02)")
    end = "            if taken == steps:\n                import os; os.kill(os.getpid(), 15)\n"
    (tmp_path / "train.py").write_text(text.replace("            if taken == steps:\n", end))
    ended, (found,) = run("train.py", "slow", 16)
    assert ended.returncode == 143, ended.stderr
    assert found["diagnosis"]["verdict"] == "loading" and found["facts"]["profile"] is None
    assert not (tmp_path / "diagnosis").exists() and "profile" not in found["diagnosis"]["evidence"]


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
    "starts another Python, and a process in its dataset": """import subprocess, venv
venv.create("other", symlinks=True)
started = ["other/bin/python", "-c", "print('started')"]
print(subprocess.check_output(started, stderr=subprocess.STDOUT, text=True).strip())
def produce(queue):
    for row in data.tolist(): queue.put(row)
class Produced(torch.utils.data.IterableDataset):
    def __iter__(self):
        fork = multiprocessing.get_context("fork")  # other processes would run this whole script, too
        queue = fork.Queue()
        fork.Process(target=produce, args=(queue,), daemon=True).start()
        return (torch.tensor(queue.get()) for _ in data)
train(Produced())""",
    "closes all files, and prints in its dataset": """class Printing(list):
    def __getitem__(self, index): return print("item", flush=True) or super().__getitem__(index)
train(Printing(data), lambda: next(number) or os.closerange(3, 256))""",
    "has an iterator of its own": """class Own(DataLoader):
    def _get_iterator(self): return (each for each in super()._get_iterator())
train(data, loader=Own)""",
    "diagnoses a loop of its own before, meanwhile and afterwards": """from stepscope.diagnosis import diagnose
def own():
    found = []
    diagnose(DataLoader(data, 8), lambda batch: found.append(len(batch)), steps=5, folder="own")
    print(len(found) > 20)
own()
train(data, lambda: next(number) != 3 or own())
own()""",
    "diagnoses a loop of its own while stepscope profiles": """from stepscope.diagnosis import diagnose
def own(): print(len(diagnose(DataLoader(data, 8), lambda batch: None, steps=5, folder="own").steps))
train(data, lambda: next(number) != 15 or own())""",
}
PRINTS = {  # each script prints the sum of the weights that it has trained, and some print more
    "starts another Python, and a process in its dataset": ["started", "WEIGHT"],
    "closes all files, and prints in its dataset": [*["item"] * 6 * 320, "WEIGHT"],
    "diagnoses a loop of its own before, meanwhile and afterwards": ["True", "True", "WEIGHT", "True"],
    "diagnoses a loop of its own while stepscope profiles": ["5", "WEIGHT"],
}


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    """The sum of the weights that the training prints without stepscope."""
    script = tmp_path_factory.mktemp("alone") / "alone.py"
    script.write_text(f"{TRAINS}train(data)")
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("does", BESIDES)
def test_a_script_with_other_work_ends_and_prints_as_without_stepscope(run, weight, tmp_path, does):
    (tmp_path / "besides.py").write_text(TRAINS + BESIDES[does])
    ended, (found,) = run("besides.py", steps=5)
    # On a busy machine a diagnosis that takes long shows a progress bar
    printed = [line for line in ended.stdout.splitlines() if "diagnosing" not in line]
    expected = [line.replace("WEIGHT", weight) for line in PRINTS.get(does, ["WEIGHT"])]
    assert (ended.returncode, printed) == (0, expected), ended.stderr
    profiles = does.startswith(("profiles", "warms its profiler up")) or "while stepscope profiles" in does
    unknown = found["diagnosis"]["unknown"]
    assert any("PyTorch's profiler itself" in text for text in unknown) == profiles, found


def test_a_script_runs_as_without_stepscope_where_a_package_is_broken(run, weight, tmp_path):
    (tmp_path / "besides.py").write_text(f"{TRAINS}train(data)")
    (tmp_path / "site" / "pandas.py").write_text("raise ValueError('numpy.dtype size changed')")
    ended, (found,) = run("besides.py")
    assert (ended.returncode, ended.stdout) == (0, f"{weight}\n")
    assert "numpy.dtype size changed" in found["problem"] and "cannot observe" in ended.stderr


def test_files_that_a_script_writes_into_the_folder_of_the_profile_are_kept(tmp_path, capsys):
    recorded, folder = tmp_path / "reports" / "script.1.pt.trace.json", tmp_path / "diagnosis"
    recorded.parent.mkdir()
    recorded.touch()
    doors.show([{"rank": 0, "ranks": 1, "problem": "It ended."}], [recorded], folder, {})
    (folder / "checkpoint.pt").touch()
    doors.show([{"rank": 0, "ranks": 1, "problem": "It ended."}], [recorded], folder, {})
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", recorded.name]
    printed = capsys.readouterr().err
    assert printed.count("It ended.") == 2 and printed.count("found checkpoint.pt in it") == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getppid(), signal.SIGUSR1); os.kill(os.getppid(), signal.SIGHUP); sys.exit(7)", 7),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 143),
    ],
)
def test_the_status_is_that_of_the_script_and_an_earlier_recording_stays(run, tmp_path, script, status):
    (tmp_path / "train.py").write_text(f"import os, signal, sys, time\nos.makedirs('found.json/own')\n{script}")
    (tmp_path / "diagnosis").mkdir()
    (tmp_path / "diagnosis" / "earlier.1.pt.trace.json").touch()
    ended, _ = run("train.py")
    assert ended.returncode == status, ended.stderr
    assert f"ended with status {status}. Nothing was seen" in ended.stderr
    assert "found.json" in ended.stderr and "Traceback" not in ended.stderr
    assert (tmp_path / "diagnosis" / "earlier.1.pt.trace.json").exists()


def test_only_the_ranks_of_one_machine_are_waited_for(tmp_path):
    for rank, content in ((2, {"problem": "It ended."}), (3, {"facts": {}}), (2, {"facts": {}})):
        assert launch.complete(tmp_path) == []
        (tmp_path / f"{rank}.json").write_text(json.dumps({"rank": rank, "ranks": 4, "here": 2, **content}))
    assert [report["rank"] for report in launch.complete(tmp_path)] == [2, 3]
