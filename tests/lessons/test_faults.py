"""A script with seeded faults: drawn, run, graded; scripts that are wrong are refused by name, and leave no process."""

import itertools
import multiprocessing
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from support import ranks

from helpers import config
from helpers.__main__ import main
from helpers.lessons import faults
from helpers.lessons.faults import catalogue, grading, running
from stepscope import rules

pytestmark = pytest.mark.processes

STEPS = 2 * catalogue.EPOCH_STEPS
SEEDS = [0, 28, 4, 1]  # their scripts have all faults, and each has none with the mark of another one in the next


@pytest.fixture(scope="module", autouse=True)
def settings(drawn_images):
    """A busy machine may take long for a script. The same script runs once for all tests."""
    run, runs = running.run, {}

    def once(path, steps):
        text = Path(path).exists() and Path(path).read_text(encoding="utf-8")
        if text not in runs:
            runs[text] = run(path, steps)
        return runs[text]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in drawn_images.items():
            patch.setenv(name, value)
        patch.setattr(running, "LIMIT", 1000.0)
        patch.setattr(running, "run", once)
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
        path = tmp_path / "train.py"
        path.write_text(faults.text((), images), encoding="utf-8")
        return ranks.changed(path, path, **{old: (old, new) for old, new in changes})

    return write


@pytest.fixture(scope="module")
def right(tmp_path_factory, images):
    """What the script without faults does in two epochs."""
    return running.run(faults.write(tmp_path_factory.mktemp("fixed") / "train.py", (), images), STEPS)


def change_of(path, right):
    return grading.changed(running.run(path, STEPS), right)


def test_a_seed_draws_six_faults_one_of_which_only_a_gpu_feels():
    drawn = [faults.draw(seed) for seed in range(200)]
    for six in drawn:
        assert Counter(fault.place for fault in six) == {"loading": 3, "loop": 2, "GPU": 1}
    assert len(set(drawn)) > 150 and {fault for seed in SEEDS for fault in drawn[seed]} == set(catalogue.FAULTS)
    assert [catalogue.FAULTS.index(fault) for fault in drawn[7]] == [3, 6, 7, 8, 10, 14]  # the same on every machine


def test_each_piece_is_in_the_script_once_also_beside_any_other_fault():
    script = catalogue.SCRIPT.read_text(encoding="utf-8")
    for fault in catalogue.FAULTS:
        assert [right for right, _ in fault.edits if script.count(right) != 1] == []
    for one, other in itertools.permutations(catalogue.FAULTS, 2):
        if one.fits_beside(other):
            text = faults.text((one, other), Path("images"))
            assert [wrong for _, wrong in (*one.edits, *other.edits) if wrong not in text] == [], (one.name, other.name)


def test_each_fault_names_a_notebook_and_what_diagnose_calls_it():
    names = {rule.name for rule in rules.ALL}
    for fault in catalogue.FAULTS:
        assert (config.PROJECT / "notebooks" / f"{fault.notebook}.ipynb").exists()
        assert fault.finding is None or fault.finding in names


@pytest.mark.slow
def test_a_script_runs_with_spawned_workers_as_on_macos_and_windows(changed, right, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: "spawn")
    one = changed(("num_workers=min(4, os.cpu_count())", "num_workers=1"))  # each takes seconds to import what it needs
    assert change_of(one, right) is None


OTHER = {  # what a script may do less or otherwise, in good faith, and what is then said
    "an empty checkpoint": (("model.state_dict(), C", "{}, C"), "No checkpoint: "),
    "learning rate": (("lr=0.1", "lr=0.099"), "Not the same training: in step "),
    "the same batch from the second epoch on": (
        ("in loader:\n", "in [next(iter(loader))] * 8 if epoch else loader:\n"), r"Not .*: in step (9|1.) of 16"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), OTHER.values(), ids=OTHER)
def test_a_script_that_does_something_else_is_refused_and_that_is_said(change, said, changed, right):
    assert re.match(said, change_of(changed(change), right))


def test_a_loss_that_is_no_number_and_missing_output_are_refused_and_that_is_said(right):
    no_number = replace(right, losses=(*right.losses[:-1], float("nan")))
    assert grading.changed(no_number, right).startswith("Not the same training: in step 16 of 16 ")
    no_accuracy = replace(right, printed=re.sub(r"accuracy \d+\.", "accuracy 0.", right.printed))
    assert grading.changed(no_accuracy, right).startswith("Not the same output: expected the line 'epoch 0: loss ")
    assert grading.changed(replace(right, saved=False), right).startswith("No checkpoint: ")


def test_a_script_that_is_fixed_in_another_way_is_the_same(changed, right):
    path = changed(
        ("num_workers=min(4, os.cpu_count())", "num_workers=1, prefetch_factor=8"),
        ("Network().to(device)", "Network().to(device, memory_format=torch.channels_last)"),
        ("    return loss.detach(), correct\n", "    CORRECT.append(correct)\n    return loss.detach()\n"),
        ("            loss, correct = train_step(", "            loss = train_step("),
        ("            right += correct\n", ""),
        ("        torch.save(", "        right = sum(CORRECT)\n        CORRECT.clear()\n        torch.save("),
        ("def make_loader():\n", "CORRECT = []\n\n\ndef make_loader():\n"),
        ("        print(f", "        print('epoch done')\n        print('\\n' + f"),
    )
    assert change_of(path, right) is None


def test_a_scripts_own_clock_is_not_asked_and_a_missing_checkpoint_is_seen(changed):
    """By its own, each look at which moves it on by a nanosecond, its steps take next to no time."""
    clock = "import itertools\n\nticks = itertools.count(1)\ntime.perf_counter = lambda: next(ticks) / 1e9\n\n"
    unsaved = ("        torch.save(model.state_dict(), CHECKPOINT)\n", "")
    path = changed(("device = torch.device(", f"{clock}device = torch.device("), unsaved)
    path.with_name("checkpoint.pt").write_bytes(bytes(10**7))  # an earlier run's
    run = running.run(path, STEPS)
    assert min(run.durations) > 1e-5 and not run.saved


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_change_no_training_and_each_is_listed_as_gone_or_as_still_there(seed, tmp_path, images):
    """Graded are the script without faults, the drawn one, and that of another seed, which may share some faults."""
    path, drawn, others = tmp_path / "train.py", faults.draw(seed), faults.draw(SEEDS[SEEDS.index(seed) - 1])
    pageable = [] if torch.cuda.is_available() else ["copies from pageable memory"]  # nothing is pinned there
    for left in ((), drawn, others):
        path.write_text(faults.text(left, images), encoding="utf-8")
        grade = grading.grade(path, seed, images)
        assert grade.faults == {
            fault: grading.UNSEEN if fault.name in pageable else grading.LEFT if fault in left else grading.GONE
            for fault in drawn
        }
        assert grade.passed == (not {*drawn} & {*left})
        gone = {fault.name for fault, seen in grade.faults.items() if seen == grading.GONE}
        assert {fault.name for fault in drawn if fault.name in str(grade)} == gone  # no other is given away


def test_images_that_are_kept_hide_no_fault_in_loading(changed, images):
    """Cached by each worker: from the second epoch on decoding costs next to nothing."""
    cached = "    @functools.cache\n    def __getitem__("
    path = changed(("import csv\n", "import csv\nimport functools\n"), ("    def __getitem__(", cached))
    twice = next(fault for fault in faults.draw(0) if fault.name == "decoded twice")
    path.write_text(twice.put_into(path.read_text(encoding="utf-8")), encoding="utf-8")
    graded = grading.grade(path, 0, images).faults
    assert [fault for fault, seen in graded.items() if seen == grading.LEFT] == [twice]


WRONG = {
    "syntax": (("def main(epochs=3):", "def main(epochs=3)"), 'train.py", line 89'),
    "error": (("    loss.backward()", "    raise KeyError('oops')"), "line 82, in train_step"),
    "exit": (("    loss.backward()", "    raise SystemExit(2)"), "SystemExit: 2"),
    "worker": (("        image =", "        1 / 0; image ="), "in __getitem__\n    1 / 0"),
    "function": (("def make_loader", "def loader"), "no function make_loader"),
    "epochs": (("range(epochs)", "range(0)"), "after 0 calls of train_step"),
    "loader": (("    loader = make_loader()\n", "    loader = DataLoader(Images(DATA, IMAGES), BATCH)\n"), "no longer"),
    "killed": (("    loss.backward()", "    os._exit(3)"), "exit code 3"),
    "endless": (("    loss.backward()", "    while True: pass"), "without an end"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_script_that_is_wrong_is_refused_by_name_and_leaves_no_process(name, changed, images, monkeypatch):
    change, message = WRONG[name]
    path = changed(change)
    if name == "endless":
        monkeypatch.setattr(running, "LIMIT", 2)
    processes, end = [], running._end

    def watched(process):
        with suppress(psutil.NoSuchProcess):
            script = psutil.Process(process.pid)
            processes.extend([script, *script.children(recursive=True)])
        end(process)

    monkeypatch.setattr(running, "_end", watched)
    with pytest.raises(running.ScriptFailed, match=re.escape(message)) as raised:
        grading.grade(path, 0, images)
    assert str(path) in str(raised.value)
    assert "helpers" not in str(raised.value)  # only the script's own lines
    _, left = psutil.wait_procs(processes, 120)  # the workers of a process that was killed look every 5 s
    assert left == []


def test_an_edited_script_is_not_overwritten_and_that_is_said(tmp_path, images, capsys):
    path = faults.write(tmp_path / "new" / "train.py", faults.draw(1), images)
    faults.write(path, faults.draw(1), images)
    assert capsys.readouterr().out == f"Wrote {path}.\n" * 2
    path.write_text("mine")
    faults.write(path, faults.draw(1), images)
    assert path.read_text() == "mine"
    assert "Delete it to begin anew" in capsys.readouterr().out


def test_steps_are_kept_in_their_order_under_the_names_they_are_given(tmp_path):
    path = tmp_path / "train.py"
    for name, content in (("as drawn", "1"), ("more/workers: 4 (fixed)", "2"), ("as drawn", "3"), ("b", "4")):
        path.write_text(content)
        steps = faults.keep(path, name)
    kept = [(name, copy.read_text()) for name, copy in steps.items()]
    assert kept == [("as drawn", "3"), ("more workers 4 (fixed)", "2"), ("b", "4")]
    with pytest.raises(ValueError, match="Expected a name"):
        faults.keep(path, "/")


def test_the_pipeline_of_a_script_trains_in_this_process_without_printing(changed, capsys):
    path = changed(("    return loss.detach(), correct\n", "    print('loss')\n    return loss.detach(), correct\n"))
    loader, step = running.pipeline(path)
    images, labels = next(iter(loader))
    threads = torch.get_num_threads()
    assert step(images, labels)[0].item() > 0
    assert torch.get_num_threads() == threads and capsys.readouterr().out == ""
    with pytest.raises(running.ScriptFailed, match="1 / 0"):
        running.pipeline(changed(("    torch.manual_seed(SEED)\n", "    1 / 0\n")))


@pytest.mark.slow
def test_a_script_is_drawn_and_graded_in_a_shell(tmp_path, images, capsys):
    path = tmp_path / "train.py"
    assert main(["exercise", "--seed", "7", "--out", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == faults.text(faults.draw(7), images)
    path.write_text(faults.text((), images).replace("lr=0.1", "lr=0.2"), encoding="utf-8")
    assert main(["grade", "--seed", "7", str(path)]) == 1
    assert "Not the same training" in capsys.readouterr().out
    assert main(["grade", "--seed", "7", str(tmp_path / "missing.py")]) == 1
    assert re.match(r"ScriptFailed: .*missing.py: .*", capsys.readouterr().err)


def test_each_group_gets_a_script_of_other_faults_and_its_line_for_grading(tmp_path, images, capsys, monkeypatch):
    folder = tmp_path / "scripts"
    assert main(["exercise", "--groups", "30", "--seed", "7", "--out", str(folder)]) == 0
    lines = re.findall(r"python -m helpers grade --seed (\d+) (.*)", capsys.readouterr().out)
    assert [seed for seed, _ in lines][:3] == ["701", "702", "703"]
    assert {path for _, path in lines} == set(map(str, folder.iterdir()))
    for seed, path in lines:
        assert Path(path).read_text(encoding="utf-8") == faults.text(faults.draw(int(seed)), images)
    assert len({faults.draw(int(seed)) for seed, _ in lines}) == 30
    monkeypatch.setattr(faults, "draw", lambda seed: (catalogue.FAULTS[seed // 2 - 350],))  # seeds that repeat faults
    assert list(faults.write_for_groups(tmp_path, 4, 7, images).values()) == [701, 702, 704, 706]
