"""A script with seeded faults: drawn, run, graded; scripts that are wrong are refused by name, and leave no process."""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import time
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


SEED = 3  # of the weights
STEPS = 2 * catalogue.EPOCH_STEPS


def trained(path):
    """What a script does in two epochs with its own network."""
    return running.run(path, STEPS, seed=SEED)


def timed(path):
    """What a script does in an epoch of warm-up and a timed one, in front of an accelerator."""
    return running.run(path, STEPS // 2, STEPS // 2, SEED, simulated=True)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory, images):
    """The script without faults."""
    return faults.write(tmp_path_factory.mktemp("fixed") / "train.py", (), images)


@pytest.fixture(scope="module")
def right(fixed):
    """What it does."""
    return trained(fixed)


@pytest.fixture(scope="module")
def right_timed(fixed):
    """What it does in front of an accelerator."""
    return timed(fixed)


def graded(run, right):
    """The grade of a script that has trained, and was not timed."""
    return grading.Grade({grading.YOURS: run, grading.FIXED: right}, None)


def graded_as_timed(run, right, right_timed):
    """The grade of a script that trains as it should, and did this as it was timed."""
    compared = timing.Comparison(
        {grading.ORIGINAL: (right_timed,), grading.YOURS: (run,), grading.FIXED: (right_timed,)}
    )
    return grading.Grade({grading.YOURS: right, grading.FIXED: right}, compared)


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
def test_a_fault_changes_nothing_that_is_learned_printed_or_saved(fault, right, tmp_path, images):
    assert graded(trained(faults.write(tmp_path / "train.py", [fault], images)), right).change is None


@pytest.mark.slow
def test_a_script_runs_with_spawned_workers_as_on_macos_and_windows(changed, right, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: "spawn")
    one = changed(("num_workers=min(4, os.cpu_count())", "num_workers=1"))  # each takes seconds to import what it needs
    assert graded(trained(one), right).change is None


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
    assert graded(trained(changed(change)), right).change.startswith("Not the same training: in step ")


def test_another_training_is_refused_however_fast_it_is(changed, images):
    grade = grading.grade(changed(CHANGES["learning rate"]), 0, images)
    assert not grade.passed
    assert grade.timed is None
    assert re.match(r"Not the same training: in step \d of 16 the loss is", str(grade))


HONEST = {
    "workers": [("num_workers=min(4, os.cpu_count())", "num_workers=1, prefetch_factor=8")],
    "pinned memory": [("pin_memory=torch.cuda.is_available()", "pin_memory=True")],
    "memory format": [("Network().to(device)", "Network().to(device, memory_format=torch.channels_last)")],
    "normalized in the step, in another order": [
        ("        images = (images / 255 - self.mean) / self.std\n", ""),
        ('        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))\n', ""),
        ('        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))\n', ""),
        (
            "    logits = model(images)\n",
            "    mean, std = (255 * torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))\n"
            "    logits = model((images - mean) / std)\n",
        ),
    ],
    "loss alone, and the rest counted and printed elsewhere": [
        ("    return loss.detach(), correct\n", "    CORRECT.append(correct)\n    return loss.detach()\n"),
        ("            loss, correct = train_step(", "            loss = train_step("),
        ("            right += correct\n", ""),
        ("        torch.save(", "        right = sum(CORRECT)\n        CORRECT.clear()\n        torch.save("),
        ("def make_loader():\n", "CORRECT = []\n\n\ndef make_loader():\n"),
        ("        print(f", "        print('epoch done')\n        sys.stdout.write('\\n' + f"),
        ("import os\n", "import os\nimport sys\n"),
    ],
}


@pytest.mark.parametrize("changes", HONEST.values(), ids=HONEST)
def test_a_script_that_is_fixed_in_another_way_is_the_same(changes, changed, right, right_timed):
    path = changed(*changes)
    assert graded(trained(path), right).change is None
    assert graded_as_timed(timed(path), right, right_timed).change is None


TRAINING, OUTPUT, CHECKPOINT = "Not the same training: ", "Not the same output: ", "Not the same checkpoint: "

# What makes a script faster, or seem so, and does less; in two epochs of training
FOOLING = {
    "the same batch from the second epoch on": (
        (
            "        for images, labels in loader:\n",
            "        for images, labels in [next(iter(loader))] * 8 if epoch else loader:\n",
        ),
        f"{TRAINING}in step (9|1.) of 16",
    ),
    "epochs of four steps": (
        (
            "            right += correct\n",
            "            right += correct\n            if len(losses) == 4:\n                break\n",
        ),
        f"{TRAINING}in step [5-8] of 16",
    ),
    "no weights learned": (("    optimizer.step()\n", ""), TRAINING),
    "losses known beforehand": (
        ("    loss.backward()\n", "    loss = torch.tensor(float(LOSSES.readline()))\n"),
        f"{TRAINING}in step 1 of 16",
    ),
    "batches that say they hold more": (
        ("            loss, correct =", "            images = images.as_subclass(Many)\n            loss, correct ="),
        "Not the same images: by their length the batches hold 20480, and without faults 2048",
    ),
    "no printing": (("        print(f", "        str(f"), f"{OUTPUT}expected the line 'epoch 0: loss "),
    "accuracy not counted": (("            right += correct\n", ""), f"{OUTPUT}expected the line 'epoch 0: loss "),
    "no checkpoint": (("        torch.save(model.state_dict(), CHECKPOINT)\n", ""), CHECKPOINT),
    "checkpoint of the first epoch only": (
        ("        torch.save(", "        epoch or torch.save("),
        CHECKPOINT,
    ),
    "checkpoint put off to a thread": (
        (
            "        torch.save(model.state_dict(), CHECKPOINT)\n",
            "        later = threading.Timer(1000, torch.save, (model.state_dict(), CHECKPOINT))\n"
            "        later.daemon = True\n        later.start()\n",
        ),
        CHECKPOINT,
    ),
}
MORE = (
    "device = torch.device(",
    "import threading\n\n\nclass Many(torch.Tensor):\n    def __len__(self):\n        return 1280\n\n\n"
    "LOSSES = Path(__file__).with_name('losses.txt').open()\n\ndevice = torch.device(",
)


@pytest.mark.parametrize(("change", "answer"), FOOLING.values(), ids=FOOLING)
def test_a_script_that_does_less_is_refused_and_that_is_said(change, answer, changed, right, fixed):
    path = changed(MORE, change)
    known = running.run(fixed, STEPS, seed=0).losses if "LOSSES" in change[1] else ()
    path.with_name("losses.txt").write_text("\n".join(map(str, known)))
    grade = graded(trained(path), right)
    assert re.match(answer, grade.change)
    assert str(grade) == grade.change
    assert not grade.passed


# What a script does only where it is timed, by what shows that: the model's forward is another one
FOOLING_THE_CLOCK = {
    "no weights learned": (
        "    loss.backward()\n",
        "    if model.forward.__name__ != 'simulated':\n        loss.backward()\n",
    ),
    "only the first image is right": (
        "    logits = model(images)\n",
        "    if model.forward.__name__ == 'simulated':\n        images[1:] = 0\n    logits = model(images)\n",
    ),
}


@pytest.mark.parametrize("change", FOOLING_THE_CLOCK.values(), ids=FOOLING_THE_CLOCK)
def test_a_script_that_does_less_only_while_it_is_timed_is_refused(change, changed, right, right_timed):
    grade = graded_as_timed(timed(changed(change)), right, right_timed)
    assert grade.change.startswith(f"It trains as it did, but not while it is timed. {TRAINING}")
    assert not grade.passed


SIMULATED = {
    "an accelerator that does nothing": "simulate.SimulatedAccelerator.__call__ = lambda *batch: None\n",
    "a clock that is ten times as fast, and no sleep": (
        "clock = time.perf_counter\ntime.perf_counter = lambda: 10 * clock()\ntime.sleep = lambda seconds: None\n"
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is simulated")
@pytest.mark.parametrize("lines", SIMULATED.values(), ids=SIMULATED)
def test_a_script_that_does_not_wait_for_the_accelerator_is_refused(lines, changed):
    path = changed(("device = torch.device(", f"from helpers import simulate\n\n{lines}device = torch.device("))
    with pytest.raises(running.ScriptLacking, match="no longer wait for the simulated accelerator"):
        timed(path)


def test_a_scripts_own_clock_is_not_asked(changed):
    """By its own, each look at which moves it on by a nanosecond, its steps take next to no time."""
    clock = "import itertools\n\nticks = itertools.count(1)\ntime.perf_counter = lambda: next(ticks) / 1e9\n\n"
    before = time.perf_counter()
    run = trained(changed(("device = torch.device(", f"{clock}device = torch.device(")))
    assert before < run.begin < run.begin + run.seconds < time.perf_counter()
    assert min(run.durations) > 1e-5


@pytest.mark.slow
def test_a_fixed_script_is_the_same_training_and_is_timed_beside_both(changed, images):
    grade = grading.grade(changed(), 0, images)
    assert grade.change is None
    assert grade.same_training
    assert grade.timed.names == [grading.ORIGINAL, grading.YOURS, grading.FIXED]
    for run in itertools.chain(*grade.timed.timings.values()):
        assert run.images == 8 * 128
        assert len(run.durations) == len(run.waits) == 8
        assert sum(run.durations) == pytest.approx(run.seconds)
        assert min(run.waits) >= 0
        assert sum(run.losses) > 0
    assert re.search(r"You have \d+\.\d×; with all fixed it is \d+\.\d×", str(grade))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.85, 0.91), "Passed: it is about as fast"),
        ((0.5, 3.5), "Passed: it is about as fast"),
        (
            (0.85, 0.89),
            "Undecided: it reaches 87% of what there is, in 2 rounds too different to show .* grade it again",
        ),
        ((0.5, 0.5, 0.5, 0.51, 0.52), "Not yet: it reaches 51% .* Diagnose it again, as it is now.$"),
        ((0.5, 0.5, 0.5, 0.5, 0.52, 0.5, 0.51, 0.5, 0.95), "Not yet: it reaches 54% .*, as it is now.$"),
        (
            (2.6, 3.5),
            "Implausible: in each round it had at least 2.6 times the throughput of the script with all faults",
        ),
    ],
)
def test_a_grade_is_a_verdict_in_words(ratios, verdict, right):
    def runs(rates):
        return tuple(replace(right, seconds=1 / rate) for rate in rates)

    equal = [1] * len(ratios)
    runs = {grading.ORIGINAL: runs(equal), grading.YOURS: runs(ratios), grading.FIXED: runs(equal)}
    grade = grading.Grade({grading.YOURS: right, grading.FIXED: right}, timing.Comparison(runs))
    assert re.search(verdict, str(grade))
    assert grade.passed == verdict.startswith("Passed")
    assert (grade.implausible is not None) == verdict.startswith("Implausible")


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
        running.run(changed(change), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is simulated")
def test_a_simulated_network_is_called_with_an_image_that_is_drawn_and_answers_for_all(threads):
    seen = []

    class Network(torch.nn.Module):
        def forward(self, images):
            seen.append(images.flatten().tolist())
            return images[:, 0, 0]

    model = child.simulating(Network(), SEED)
    for _ in range(20):
        assert model(torch.arange(5.0).view(5, 1, 1, 1)).shape == (5, 1)
    assert {len(images) for images in seen} == {1}
    assert len({image for (image,) in seen}) > 1


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
    torch.set_num_threads(3)  # `threads` sets it back
    assert step(images, labels)[0].item() > 0
    assert torch.get_num_threads() == 3
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
