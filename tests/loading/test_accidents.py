"""The accidents that notebooks 06 and 14 show happen every time, and do not happen to our own formats."""

import multiprocessing

import numpy as np
import pytest

from helpers.loading import accidents, formats

pytestmark = pytest.mark.processes

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine it may take long until both workers are there."""
    monkeypatch.setattr(accidents, "_PATIENCE", 120.0)


@needs_fork
def test_an_hdf5_file_opened_before_the_fork_gives_wrong_images_and_no_error(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8), np.uint8)
    formats.FORMATS["hdf5"].pack(images, range(6), tmp_path / "hdf5")
    dataset = accidents.Hdf5OpenedTooEarly(tmp_path / "hdf5" / "data.h5")
    assert np.array_equal(np.stack([dataset[index] for index in range(len(dataset))]), images)
    loaded = accidents.load_with_two_workers(dataset)
    assert loaded.shape == images[:4].shape
    assert not (loaded == images[:4]).all()  # one worker's first image at least; what follows is left to chance


@pytest.mark.parametrize(
    ("start", "answer"), [pytest.param("fork", "no answer", marks=needs_fork), ("spawn", "answered")]
)
def test_a_fork_of_a_process_that_used_an_object_store_gets_no_answer(start, answer):
    assert accidents.store_in_a_child(start) == answer
