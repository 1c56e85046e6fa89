"""Photos in class folders: the reader's own, or drawn once for all processes, whole or not at all."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from helpers import config
from helpers.data import photos, synthetic
from stepscope.base import staging

COUNT = 12  # in two parts


@pytest.fixture(autouse=True)
def few_photos(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COURSE_PRESET", "ci")
    monkeypatch.setitem(config.PRESETS, "ci", replace(config.PRESETS["ci"], drawn_photos=COUNT))


def test_drawn_photos_lie_in_the_folders_of_their_classes_and_are_used_again(capsys):
    prepared = photos.prepare()
    assert (prepared.images, prepared.source) == (COUNT, f"drawn photos ({COUNT})")
    for number in range(COUNT):
        drawn, label = synthetic.draw_photo(number, config.SEED)
        name = synthetic.CLASSES[label].removeprefix("drawn: ").replace(" ", "-")
        assert name in prepared.classes
        stored = np.asarray(Image.open(prepared.folder / name / f"{number:05d}.jpg")).astype(int)
        assert stored.shape == drawn.shape
        assert abs(stored - drawn).mean() < 6  # of 255: what a JPEG changes
    moment = (prepared.folder / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    assert photos.prepare() == prepared
    assert (prepared.folder / "manifest.json").stat().st_mtime_ns == moment
    (line,) = capsys.readouterr().out.splitlines()
    assert str(prepared.folder) in line and "COURSE_PHOTOS" in line


def test_a_drawn_set_that_is_not_as_it_was_made_is_named():
    photo = sorted(photos.prepare().folder.glob("*/*.jpg"))[7]
    photo.unlink()
    with pytest.raises(staging.DamagedFolder, match=photo.name):
        photos.prepare()


def test_the_readers_own_photos_are_named_by_the_environment_and_only_read(tmp_path, monkeypatch, capsys):
    own = tmp_path / "Holiday"
    monkeypatch.setenv("COURSE_PHOTOS", str(own))
    with pytest.raises(config.CourseError, match="Holiday.*COURSE_PHOTOS"):
        photos.prepare()
    for name in ("sea/1.jpg", "sea/2.png", "hills/3.jpg"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20)).save(own / name)
    before = sorted(own.rglob("*"))
    prepared = photos.prepare()
    assert prepared == photos.Photos(own, "photos in Holiday (3)", ("hills", "sea"), 3)
    assert prepared.source in capsys.readouterr().out
    assert sorted(own.rglob("*")) == before and not (tmp_path / "data").exists()
