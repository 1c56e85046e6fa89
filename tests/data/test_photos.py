"""Photos in class folders: the reader's own, or drawn once for all processes, whole or not at all."""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from helpers import config, staging
from helpers.data import photos, synthetic

COUNT = 20


def prepare(data_dir, **options):
    return photos.prepare(**{"data_dir": data_dir, "drawn": COUNT, "progress": False, **options})


@pytest.fixture(autouse=True)
def no_photos_named_from_outside(monkeypatch):
    monkeypatch.delenv("COURSE_PHOTOS", raising=False)


def test_drawn_photos_lie_in_the_folders_of_their_classes(tmp_path):
    prepared = prepare(tmp_path)
    assert (prepared.images, prepared.source) == (COUNT, f"drawn photos ({COUNT})")
    for number in range(COUNT):
        drawn, label = synthetic.draw_photo(number, config.SEED)
        name = synthetic.CLASSES[label].removeprefix("drawn: ").replace(" ", "-")
        assert name in prepared.classes
        stored = np.asarray(Image.open(prepared.folder / name / f"{number:05d}.jpg")).astype(int)
        assert stored.shape == drawn.shape
        assert abs(stored - drawn).mean() < 6  # of 255: what a JPEG changes


def test_prepared_photos_are_used_again_and_one_line_says_so(tmp_path, capsys):
    first = prepare(tmp_path)
    moment = (first.folder / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    assert prepare(tmp_path) == first
    assert (first.folder / "manifest.json").stat().st_mtime_ns == moment
    (line,) = capsys.readouterr().out.splitlines()
    assert "found in" in line and "COURSE_PHOTOS" in line


@pytest.mark.processes
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "found no such file"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes, found"),
        (lambda path: path.rename(path.with_name("90000.jpg")), "found no such file|expected no such file"),
        (lambda path: (path.parent.parent / "manifest.json").unlink(), "manifest.json"),
        (lambda path: (path.parent.parent / "manifest.json").write_text('{"format": 0}'), "another version"),
        (lambda path: (path.parent.parent / "manifest.json").write_text("{"), "manifest.json"),
    ],
    ids=["missing", "longer", "added", "no manifest", "other format", "broken manifest"],
)
def test_a_drawn_set_that_is_not_as_it_was_made_is_named(tmp_path, damage, message):
    prepared = prepare(tmp_path)
    damage(sorted(prepared.folder.glob("*/*.jpg"))[7])
    with pytest.raises(staging.DamagedFolder, match=message):
        prepare(tmp_path)


def test_the_readers_own_photos_are_named_by_the_environment_and_only_read(tmp_path, monkeypatch, capsys):
    own = tmp_path / "Holiday"
    for name in ("sea/1.jpg", "sea/2.png", "hills/3.jpg"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20)).save(own / name)
    before = sorted(own.rglob("*"))
    monkeypatch.setenv("COURSE_PHOTOS", str(own))
    prepared = prepare(tmp_path / "data")
    assert prepared == photos.Photos(own, "photos in Holiday (3)", ("hills", "sea"), 3)
    assert "3 in 2 classes" in capsys.readouterr().out
    assert sorted(own.rglob("*")) == before and not (tmp_path / "data").exists()


def test_a_folder_of_the_readers_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PHOTOS", str(tmp_path / "Holidya"))
    with pytest.raises(photos.BadFolder, match="Holidya.*COURSE_PHOTOS"):
        prepare(tmp_path)


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(staging, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".preparing.lock"]


def prepare_and_die(data_dir, number):
    """Prepare 60 photos, and be killed when so many have been opened to write them."""
    opened = itertools.count()

    def count(event, arguments):
        path = str(arguments[0]) if event == "open" else ""
        if path.startswith(str(data_dir)) and path.endswith(".jpg") and next(opened) == number:
            os.kill(os.getpid(), 9)

    sys.addaudithook(count)
    prepare(data_dir, drawn=60)


@pytest.mark.slow
def test_killed_in_the_middle_there_is_everything_or_nothing_and_the_next_run_succeeds(tmp_path):
    context = multiprocessing.get_context("spawn")
    for number in (0, 20, 59):
        data_dir = tmp_path / str(number)
        process = context.Process(target=prepare_and_die, args=(data_dir, number))
        process.start()
        process.join()
        assert process.exitcode not in (0, 1)  # it was killed
        assert list(data_dir.glob(".*.staging-*"))
        assert prepare(data_dir, drawn=60).images == 60
        assert {path.name for path in data_dir.iterdir()} == {".preparing.lock", "photos-drawn-60"}


@pytest.mark.processes
def test_of_four_processes_one_draws_and_the_others_wait(tmp_path):
    code = (
        "import pathlib, sys; from helpers.data import photos; "
        f"photos.prepare(data_dir=pathlib.Path(sys.argv[1]), drawn={COUNT}, progress=False)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with staging.only_one_process(tmp_path):  # so that all are there before one of them begins
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=config.PROJECT) for _ in range(4)]
        for process in processes:
            assert process.stdout.readline().startswith("Another process is preparing")
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sorted(output.split(", ")[1].split()[0] for output in outputs) == ["found", "found", "found", "made"]


def test_the_manifest_holds_the_size_of_every_photo(tmp_path):
    prepared = prepare(tmp_path)
    sizes = json.loads((prepared.folder / "manifest.json").read_text())["bytes"]
    assert len(sizes) == COUNT
    assert all((prepared.folder / name).stat().st_size == size for name, size in sizes.items())


def test_importing_does_not_import_torch():
    code = "import sys; from helpers.data import photos; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=config.PROJECT).returncode == 0
