"""Copies resized ahead: as the loader's own resizing makes them, whole or not at all."""

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from helpers.data import synthetic
from helpers.loading import datasets, resizing
from stepscope.base import staging

SIZE = 64


@pytest.fixture
def originals(tmp_path):
    """A folder of six photos in two classes."""
    for number in range(6):
        path = tmp_path / "originals" / ("even", "odd")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(synthetic.draw_photo(number, seed=1)[0]).save(path, quality=90)
    return tmp_path / "originals"


def resize_ahead(originals, size=SIZE):
    return resizing.resize_ahead(originals, originals.parent / "copies", size)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".preparing.lock")


def test_copies_are_the_originals_resized_and_what_they_cost_is_recorded(originals):
    before, copies = datasets.JpegDataset(originals, v2.Resize(SIZE)), resize_ahead(originals)
    after = datasets.JpegDataset(copies.folder)
    assert len(after) == len(before) == 6
    for (expected, label), (copy, same_label) in zip(before, after, strict=True):
        assert copy.size == expected.size and min(copy.size) == SIZE and same_label == label
        assert abs(np.asarray(copy).astype(int) - np.asarray(expected)).mean() < 4  # of 255: what a JPEG changes
    assert names_in(copies.folder) == ["even", "odd", "resized.json"]
    assert names_in(copies.folder / "odd") == ["1.jpg", "3.jpg", "5.jpg"]
    assert copies.images == 6 and copies.seconds > 0
    assert copies.bytes_before == sum(path.stat().st_size for path in originals.rglob("*.jpg"))
    assert copies.bytes_after == sum(path.stat().st_size for path in copies.folder.rglob("*.jpg"))


def test_copies_of_an_earlier_call_are_replaced_and_images_of_other_kinds_become_jpegs(originals):
    resize_ahead(originals)
    (originals / "odd" / "5.jpg").unlink()
    Image.new("P", (90, 80)).save(originals / "odd" / "1.png")
    copies = resize_ahead(originals, size=32)
    assert names_in(copies.folder / "odd") == ["1.jpg", "1.png.jpg", "3.jpg"]
    assert min(Image.open(copies.folder / "odd" / "1.jpg").size) == 32
    assert Image.open(copies.folder / "odd" / "1.png.jpg").format == "JPEG"


def test_a_damaged_original_is_named_and_leaves_earlier_copies_alone(originals):
    copies = resize_ahead(originals)
    (originals / "odd" / "3.jpg").write_bytes(b"<html>")
    with pytest.raises(datasets.UnreadableImage, match=r"odd.3\.jpg"):
        resize_ahead(originals)
    assert names_in(originals.parent) == ["copies", "originals"]
    assert len(datasets.JpegDataset(copies.folder)) == 6


def test_a_folder_with_other_things_is_not_replaced(originals):
    precious = originals.parent / "copies" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(FileExistsError, match="copies"):
        resize_ahead(originals)
    assert precious.read_text() == "mine"


def test_too_little_disk_is_said_before_anything_is_written(originals, monkeypatch):
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: staging.shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(staging.NotEnoughDisk, match="6 images need"):
        resize_ahead(originals)
    assert names_in(originals.parent) == ["originals"]
