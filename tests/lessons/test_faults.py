"""A script with seeded faults: drawn, run, graded; scripts that are wrong are refused by name, and leave no process."""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import torch

from helpers import config, diagnosis, timing
from helpers.__main__ import main
from helpers.lessons import faults
from helpers.lessons.faults import catalogue, child, grading, running

pytestmark = pytest.mark.processes

NAMES = [fault.name for fault in faults.FAULTS]


@pytest.fixture(autouse=True)
def ci(monkeypatch):
    monkeypatch.setenv("COURSE_PRESET", "ci")


@pytest.fixture(scope="module", autouse=True)
def patience():
    """A busy machine may take long for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "LIMIT", 1000.0)
        yield


@pytest.fixture(scope="module")
def images(drawn_images):
    """Folder of training images."""
    (folder,) = Path(drawn_images["COURSE_DATA"]).glob("*/train")
    return folder


@pytest.fixture
def changed(tmp_path, images):
    """Writes the script without faults, with changes, and returns its path."""

    def write(*changes):
        script = faults.text((), images)
        for old, new in changes:
            assert script.count(old) == 1, old
            script = script.replace(old, new)
        path = tmp_path / "train.py"
        path.write_text(script, encoding="utf-8")
        return path

    return write


@pytest.fixture
def threads():
    """Gives PyTorch its threads back afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def losses(path, steps=catalogue.EPOCH_STEPS):
    return running.run(child.losses, path, steps)


@pytest.fixture(scope="module")
def right(tmp_path_factory, images):
    """Losses of the script without faults."""
    return losses(faults.write(tmp_path_factory.mktemp("right") / "train.py", (), images))


def test_a_script_has_six_faults_one_of_which_only_a_gpu_feels():
    for seed in range(50):
        places = [fault.place for fault in faults.draw(seed)]
        assert {place: places.count(place) for place in places} == {"loading": 3, "loop": 2, "GPU": 1}


def test_different_seeds_give_different_scripts_and_use_every_fault():
    drawn = {faults.draw(seed) for seed in range(200)}
    assert len(drawn) > 150
    assert set(itertools.chain(*drawn)) == set(faults.FAULTS)


def test_a_seed_means_the_same_on_every_machine():
    assert [fault.name for fault in faults.draw(7)] == [
        "enlarged and shrunk",
        "batch made of lists",
        "rows taken from a data frame",
        "checkpoint in every step",
        "profiler left on",
        "copies from pageable memory",
    ]


def test_a_seed_means_the_same_whatever_the_faults_are_called(monkeypatch):
    before = [catalogue.FAULTS.index(fault) for fault in faults.draw(7)]
    renamed = tuple(replace(fault, name=f"fault {number}") for number, fault in enumerate(catalogue.FAULTS))
    monkeypatch.setattr(catalogue, "FAULTS", renamed)
    assert [renamed.index(fault) for fault in faults.draw(7)] == before


def test_each_piece_is_in_the_script_once_also_beside_any_other_fault():
    script = catalogue.SCRIPT.read_text(encoding="utf-8")
    for fault in faults.FAULTS:
        assert [right for right, _ in fault.edits if script.count(right) != 1] == []
    for one, other in itertools.permutations(faults.FAULTS, 2):
        if one.fits_beside(other):
            text = faults.text((one, other), Path("images"))
            assert [wrong for _, wrong in (*one.edits, *other.edits) if wrong not in text] == [], (one.name, other.name)


@pytest.mark.parametrize("seed", range(30))
def test_a_drawn_script_is_python_of_60_to_130_lines_without_the_courses_helpers(seed):
    script = faults.text(faults.draw(seed), Path("images"))
    compile(script, "train.py", "exec")
    assert 60 <= script.count("\n") <= 130
    assert "helpers" not in script


def test_each_fault_names_a_notebook_of_the_syllabus():
    syllabus = (config.PROJECT / "notebooks" / "README.md").read_text(encoding="utf-8")
    for fault in faults.FAULTS:
        assert re.search(rf"\]\({fault.notebook}\.ipynb\)|\b{fault.notebook[:2]}\b", syllabus), fault.notebook


def test_each_fault_that_diagnose_can_find_has_the_name_that_it_gives_it():
    source = "".join(path.read_text(encoding="utf-8") for path in Path(diagnosis.__file__).parent.glob("*.py"))
    assert [fault.name for fault in faults.FAULTS if fault.finding and f'"{fault.finding}"' not in source] == []


@pytest.mark.parametrize("fault", faults.FAULTS, ids=NAMES)
def test_a_fault_changes_nothing_that_is_learned(fault, right, tmp_path, images):
    wrong = faults.write(tmp_path / "train.py", [fault], images)
    assert losses(wrong) == pytest.approx(right, rel=0, abs=grading.TOLERANCE)


@pytest.mark.slow
def test_a_script_runs_with_spawned_workers_as_on_macos_and_windows(changed, right, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: "spawn")
    one = changed(("num_workers=min(4, os.cpu_count())", "num_workers=1"))  # each takes seconds to import what it needs
    assert losses(one) == pytest.approx(right, rel=0, abs=grading.TOLERANCE)


CHANGES = {
    "learning rate": ("lr=0.1", "lr=0.099"),
    "normalization": ("(images / 255 - self.mean) / self.std", "images / 255"),
    "batch": ("batch_size=BATCH", "batch_size=120"),
    "order": ("        sampler=RandomSampler(images, generator=order),\n", ""),
    "precision": (
        "    logits = model(images)\n",
        "    with torch.autocast(device.type, torch.bfloat16):\n        logits = model(images)\n",
    ),
    "loss that is no number": ("    loss.backward()", "    loss = loss * torch.nan"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_training_is_recognized(change, changed, right):
    found = losses(changed(change), steps=4)
    assert not grading.Grade({grading.YOURS: found, grading.ORIGINAL: right[:4]}, None).same_training


def test_another_training_is_refused_however_fast_it_is(changed, images):
    grade = grading.grade(changed(CHANGES["learning rate"]), 0, images)
    assert not grade.passed
    assert grade.timed is None
    assert re.match(r"Not the same training: in step \d of 8 the loss is", str(grade))


@pytest.mark.slow
def test_a_fixed_script_is_the_same_training_and_is_timed_beside_both(changed, images):
    grade = grading.grade(changed(), 0, images)
    assert grade.same_training
    assert grade.timed.names == [grading.ORIGINAL, grading.YOURS, grading.FIXED]
    for run in itertools.chain(*grade.timed.timings.values()):
        assert run.images == 8 * 128
        assert len(run.durations) == len(run.waits) == 8
        assert sum(run.durations) == pytest.approx(run.seconds)
        assert 0 <= sum(run.waits) <= run.seconds
    assert re.search(r"You have \d+\.\d of \d+\.\d×", str(grade))


@pytest.mark.parametrize(("ratios", "passed"), [((0.85, 0.91), True), ((0.85, 0.89), False)])
def test_a_grade_passes_if_a_round_finds_it_about_as_fast_as_all_fixed(ratios, passed):
    def timings(rates):
        return tuple(timing.Timing(int(rate * 100), 1.0, (0.0,), (1.0,)) for rate in rates)

    same = (2.3, 2.2)
    timed = {grading.ORIGINAL: timings((0.5, 0.5)), grading.YOURS: timings(ratios), grading.FIXED: timings((1, 1))}
    grade = grading.Grade({grading.YOURS: same, grading.ORIGINAL: same}, timing.Comparison(timed))
    assert grade.passed == passed
    assert ("Passed" in str(grade)) == passed


WRONG = {
    "syntax": (("def main(epochs=3):", "def main(epochs=3)"), running.ScriptFailed, "train.py\", line 89"),
    "import": (("import csv", "import missing_module"), running.ScriptFailed, "No module named 'missing_module'"),
    "error": (("    loss.backward()", "    raise KeyError('oops')"), running.ScriptFailed, "line 82, in train_step"),
    "exit": (("    loss.backward()", "    raise SystemExit(2)"), running.ScriptFailed, "SystemExit: 2"),
    "worker": (("        image =", "        1 / 0; image ="), running.ScriptFailed, "in __getitem__\n    1 / 0"),
    "function": (("def make_loader", "def loader"), running.ScriptLacking, "no function make_loader"),
    "epochs": (("range(epochs)", "range(0)"), running.ScriptLacking, "after 0 calls of train_step"),
    "killed": (("    loss.backward()", "    os._exit(3)"), running.ScriptDied, "exit code 3"),
    "endless": (("    loss.backward()", "    while True: pass"), running.ScriptNeverEnds, "without an end"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_script_that_is_wrong_is_refused_by_name_and_leaves_no_process(
    change, error, message, changed, images, monkeypatch
):
    path, before = changed(change), processes()
    if error is running.ScriptNeverEnds:
        monkeypatch.setattr(running, "LIMIT", 5)
    with pytest.raises(error, match=re.escape(message)) as raised:
        grading.grade(path, 0, images)
    assert str(path) in str(raised.value)
    assert "helpers" not in str(raised.value)  # only the script's own lines
    left = processes() - before
    psutil.wait_procs(left, 120)  # the workers of a process that was killed look every 5 s whether it is there
    assert [process for process in left if process.is_running()] == []


def processes():
    """Processes that multiprocessing has started for these tests, also those whose parent has ended."""
    running._context()
    if sys.platform == "linux":
        forkserver.ensure_running()  # it stays, and so it must be there before
    found, tests = set(), (os.getsid(0), os.environ.get("PYTEST_XDIST_WORKER"))
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            ours = (os.getsid(process.pid), process.environ().get("PYTEST_XDIST_WORKER")) == tests
            command = " ".join(process.cmdline())
            if ours and "multiprocessing" in command and "resource_tracker" not in command:
                found.add(process)
    return found


@pytest.mark.parametrize(
    "change",
    [
        ("    loader = make_loader()\n", "    loader = DataLoader(Images(DATA, IMAGES), BATCH)\n"),
        (
            "    model, optimizer = make_model()\n",
            "    model = Network().to(device)\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        ),
    ],
    ids=["loader", "model"],
)
def test_a_script_that_does_not_use_its_own_functions_cannot_be_timed(change, changed):
    with pytest.raises(running.ScriptLacking, match="no longer uses make_loader"):
        running.run(child.timing, changed(change), 1, 1)


def test_a_simulated_network_is_called_with_the_first_image_and_answers_for_all(threads):
    seen = []

    class Network(torch.nn.Module):
        def forward(self, images):
            seen.append(len(images))
            return images.mean((1, 2, 3))[:, None]

    device = config.device()
    logits = child.simulating(Network().to(device))(torch.ones(5, 3, 4, 4, device=device))
    assert logits.shape == (5, 1)
    assert seen == [1 if device.type == "cpu" else 5]


def test_an_edited_script_is_not_overwritten_and_that_is_said(tmp_path, images, capsys):
    path = faults.write(tmp_path / "new" / "train.py", faults.draw(1), images)
    faults.write(path, faults.draw(1), images)
    assert capsys.readouterr().out == f"Wrote {path}.\n" * 2
    path.write_text("mine")
    faults.write(path, faults.draw(1), images)
    assert path.read_text() == "mine"
    assert "Delete it to begin anew" in capsys.readouterr().out


def test_a_script_is_not_written_in_place_of_a_folder(tmp_path, images):
    with pytest.raises(faults.NotAFile, match=re.escape(str(tmp_path / "train.py"))):
        faults.write(tmp_path, (), images)


def test_steps_are_kept_in_their_order_under_the_names_they_are_given(tmp_path):
    path = tmp_path / "train.py"
    for name, content in (("as drawn", "1"), ("more/workers: 4 (fixed)", "2"), ("as drawn", "3"), ("b", "4")):
        path.write_text(content)
        steps = faults.keep(path, name)
    assert {name: copy.read_text() for name, copy in steps.items()} == {
        "as drawn": "3",
        "more workers 4 (fixed)": "2",
        "b": "4",
    }
    assert list(steps) == ["as drawn", "more workers 4 (fixed)", "b"]
    assert [copy.name for copy in (tmp_path / "steps").rglob("*") if copy.is_file()] == ["train.py"] * 3
    with pytest.raises(ValueError, match="Expected a name"):
        faults.keep(path, "/")


def test_the_pipeline_of_a_script_trains_in_this_process_without_printing(changed, capsys, threads):
    path = changed(("    return loss.detach(), correct\n", "    print('loss')\n    return loss.detach(), correct\n"))
    loader, step = running.pipeline(path)
    images, labels = next(iter(loader))
    before = torch.get_rng_state()
    assert step(images, labels)[0].item() > 0
    assert (torch.get_rng_state() == before).all()
    assert capsys.readouterr().out == ""


def test_the_pipeline_of_a_script_that_is_wrong_is_refused_by_name(changed):
    with pytest.raises(running.ScriptLacking, match="no function make_model"):
        running.pipeline(changed(("def make_model", "def model")))
    with pytest.raises(running.ScriptFailed, match="1 / 0"):
        running.pipeline(changed(("    torch.manual_seed(SEED)\n", "    1 / 0\n")))


@pytest.mark.slow
def test_the_script_trains_when_it_is_run_by_hand(changed):
    path = changed()
    process = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"(epoch \d: loss \d\.\d+, accuracy [\d.]+%, [\d,]+ images/s\n){3}", process.stdout)
    assert path.with_name("checkpoint.pt").exists()


def test_a_script_is_drawn_and_graded_in_a_shell(tmp_path, images, drawn_images, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", drawn_images["COURSE_DATA"])
    path = tmp_path / "train.py"
    assert main(["exercise", "--seed", "7", "--out", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == faults.text(faults.draw(7), images)
    path.write_text(faults.text((), images).replace("lr=0.1", "lr=0.2"), encoding="utf-8")
    assert main(["grade", "--seed", "7", str(path)]) == 1
    assert "Not the same training" in capsys.readouterr().out
    assert main(["grade", "--seed", "7", str(tmp_path / "missing.py")]) == 1
    message = r"ScriptFailed: .*missing.py failed:\nFileNotFoundError: .*missing.py'\n"
    assert re.fullmatch(message, capsys.readouterr().err)
