"""The accidents that notebooks 06 and 12 show happen every time, and do not happen to our own formats."""

import multiprocessing
import pickle
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from helpers.loading import accidents, formats

pytestmark = pytest.mark.processes

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
COUNT = 6
NAMES = ("zip", "hdf5", "lmdb")


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (COUNT, 3, 8, 8), np.uint8)


@pytest.fixture(scope="module")
def packs(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("packs")
    for name in NAMES:
        formats.FORMATS[name].pack(images, range(COUNT), folder / name)
    return folder


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine it may take long until both workers are there."""
    monkeypatch.setattr(accidents, "_PATIENCE", 120.0)


@needs_fork
def test_a_zip_archive_opened_before_the_fork_gives_one_worker_the_others_bytes(packs):
    error = accidents.load_with_two_workers(accidents.ZipOpenedTooEarly(packs / "zip" / "shard-000000.zip"))
    assert "BadZipFile" in error


@needs_fork
@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_wakes_late_does_not_find_its_own_bytes(packs, monkeypatch, late):
    class Late(accidents.SharedFile):
        def seek(self, *args):
            worker, first = get_worker_info(), self._meeting is not None
            if worker and first and worker.id != late:
                time.sleep(0.5)  # is the last to seek, so that its own place is where the file is read on
            position = super().seek(*args)
            if worker and first and worker.id == late:
                time.sleep(0.5)  # meanwhile the other one reads all of its items
            return position

    monkeypatch.setattr(accidents, "SharedFile", Late)
    error = accidents.load_with_two_workers(accidents.ZipOpenedTooEarly(packs / "zip" / "shard-000000.zip"))
    assert "BadZipFile" in error


@needs_fork
def test_an_hdf5_file_opened_before_the_fork_gives_wrong_images_and_no_error(packs, images):
    loaded = accidents.load_with_two_workers(accidents.Hdf5OpenedTooEarly(packs / "hdf5" / "data.h5"))
    assert loaded.shape == images[:4].shape
    assert not (loaded == images[:4]).all()  # one worker's first image at least; what follows is left to chance


@pytest.mark.parametrize(
    ("kind", "file"),
    [(accidents.ZipOpenedTooEarly, "zip/shard-000000.zip"), (accidents.Hdf5OpenedTooEarly, "hdf5/data.h5")],
)
def test_in_one_process_the_same_files_give_the_right_images(packs, images, kind, file):
    dataset = kind(packs / file)
    assert np.array_equal(np.stack([dataset[index] for index in range(len(dataset))]), images)


def test_an_lmdb_environment_cannot_be_pickled(packs, images):
    dataset = accidents.LmdbOpenedTooEarly(packs / "lmdb" / "data.mdb")
    assert dataset[2].endswith(images[2].tobytes())
    with pytest.raises(TypeError, match="Environment"):
        pickle.dumps(dataset)


class SideBySide(Dataset):
    """The images of several packs, without labels, as the accidents have them."""

    def __init__(self, datasets):
        self.datasets = datasets

    def __getitem__(self, index):
        return torch.stack([dataset[index][0] for dataset in self.datasets])


@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_our_formats_opened_before_the_workers_start_give_the_right_images(packs, images, start):
    dataset = SideBySide([formats.FORMATS[name].PackedDataset(packs / name) for name in NAMES])
    dataset[0]
    loaded = accidents.load_with_two_workers(dataset, start)
    for number, name in enumerate(NAMES):
        assert np.array_equal(loaded[:, number], images[:4]), name


@needs_fork
def test_a_fork_of_a_process_that_used_an_object_store_gets_no_answer():
    assert accidents.store_in_a_child("fork", patience=2) == "no answer"


def test_a_spawned_child_gets_its_answer():
    assert accidents.store_in_a_child("spawn", patience=120) == "answered"


def test_a_child_that_cannot_be_started_is_no_result():
    with pytest.raises(RuntimeError, match="exit code 1"):
        accidents.store_in_a_child("telepathy")
