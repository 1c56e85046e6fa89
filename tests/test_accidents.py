"""The accidents that notebook 06 shows happen every time, and do not happen to our own formats."""

import multiprocessing
import pickle

import numpy as np
import pytest

from helpers import accidents, formats

needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)
COUNT = 6


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (COUNT, 3, 8, 8), np.uint8)


@pytest.fixture(scope="module")
def packs(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("packs")
    for name in ("zip", "hdf5", "lmdb"):
        formats.FORMATS[name].pack(images, range(COUNT), folder / name)
    return folder


@needs_fork
@pytest.mark.parametrize("again", range(3))
def test_a_zip_archive_opened_before_the_fork_gives_one_worker_the_others_bytes(packs, again):
    error = accidents.load_with_two_workers(accidents.ZipOpenedTooEarly(packs / "zip" / "shard-000000.zip"))
    assert "BadZipFile" in error


@needs_fork
@pytest.mark.parametrize("again", range(3))
def test_an_hdf5_file_opened_before_the_fork_gives_wrong_images_and_no_error(packs, images, again):
    loaded = accidents.load_with_two_workers(accidents.Hdf5OpenedTooEarly(packs / "hdf5" / "data.h5"))
    right = (loaded == images[:4]).all(axis=(1, 2, 3))
    assert 1 <= right.sum() <= 3


@pytest.mark.parametrize(
    ("kind", "file"), [(accidents.ZipOpenedTooEarly, "zip/shard-000000.zip"), (accidents.Hdf5OpenedTooEarly, "hdf5/data.h5")]
)
def test_in_one_process_the_same_files_give_the_right_images(packs, images, kind, file):
    dataset = kind(packs / file)
    assert np.array_equal(np.stack([dataset[index] for index in range(len(dataset))]), images)


def test_an_lmdb_environment_cannot_be_pickled(packs, images):
    dataset = accidents.LmdbOpenedTooEarly(packs / "lmdb" / "data.mdb")
    assert dataset[2].endswith(images[2].tobytes())
    with pytest.raises(TypeError, match="Environment"):
        pickle.dumps(dataset)


@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("name", ["zip", "hdf5", "lmdb"])
def test_our_formats_opened_before_the_workers_start_give_the_right_images(packs, images, name, start):
    dataset = formats.FORMATS[name].PackedDataset(packs / name)
    dataset[0]
    loaded = accidents.load_with_two_workers(ImagesOnly(dataset), start)
    assert np.array_equal(loaded, images[:4])


class ImagesOnly(formats.ByItem):
    """Without labels, as the accidents have it."""

    def __getitem__(self, index):
        return self.dataset[index][0]
