"""Drawn images: the same everywhere, and like CIFAR-10 in size."""

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from helpers.data import synthetic

# Of the first 1,000 images and 20 photos of seed 2021. If these change, so must the format in helpers.data.manifests.
# Then see by hand that the images can be learned: models.SmallCNN(normalize=True), trained with Adam (1e-3) once on
# 2,560 images of seed 1 in batches of 128, named 29 to 35% of 1,024 images of seed 2 right (chance: 10%).
PIXELS = "40546ae96fed8c7b5c7c67fcbcb82d091bdf2ab0b34357e1876a75596e4495b9"
PHOTOS = "36904de0202b75fa7c576bc3955b1c27b1d1c35e0fee2b9dd071bee456b46817"
LABELS = [2, 8, 1, 5, 4, 9, 6, 7, 3, 0, 3, 8, 6, 1, 7, 2, 9, 5, 0, 4]

# Of the 5,080 training images of the subset of CIFAR-10 that this project tests with, saved as Pillow saves PNG files
REAL_SIZES = {"mean": 2260, "std": 270}  # bytes


def test_pixels_are_the_same_as_ever():
    images, labels = synthetic.draw(1_000, seed=2021)
    assert hashlib.sha256(images.tobytes()).hexdigest() == PIXELS
    assert labels[:20].tolist() == LABELS
    assert (np.sort(labels.reshape(-1, 10)) == np.arange(10)).all()  # each class once in ten images


@pytest.mark.parametrize("count", [1, 249, 251])
def test_a_small_set_is_the_beginning_of_a_larger_one(count):
    images, labels = synthetic.draw(count, seed=7)
    more_images, more_labels = synthetic.draw(600, seed=7)
    assert np.array_equal(images, more_images[:count])
    assert np.array_equal(labels, more_labels[:count])


def test_png_files_are_as_large_as_those_of_cifar10():
    images, _ = synthetic.draw(1_000, seed=2021)
    sizes = np.array([len(_encoded(image, "PNG")) for image in images])
    assert sizes.mean() == pytest.approx(REAL_SIZES["mean"], rel=0.05)
    assert sizes.std() == pytest.approx(REAL_SIZES["std"], rel=0.15)


def test_photos_are_the_same_as_ever(some_photos):
    digest = hashlib.sha256()
    for image, label in some_photos[:20]:
        digest.update(repr((image.shape, label)).encode() + image.tobytes())
    assert digest.hexdigest() == PHOTOS


def test_photos_have_the_size_of_photos_and_stand_or_lie(some_photos):
    shapes = np.array([image.shape for image, _ in some_photos])
    longer, shorter = shapes[:, :2].max(axis=1), shapes[:, :2].min(axis=1)
    assert longer.min() >= 450 and longer.max() <= 512 and len(set(longer)) > 30
    assert shorter.min() >= 300 and shorter.max() <= 400 and len(set(shorter)) > 30
    assert 15 < (shapes[:, 0] > shapes[:, 1]).sum() < 50  # of 100; a third, if chance rules
    assert 40_000 < np.median([len(_encoded(image, "JPEG", quality=90)) for image, _ in some_photos]) < 50_000


@pytest.fixture(scope="module")
def some_photos():
    return [synthetic.draw_photo(number, seed=2021) for number in range(100)]


def _encoded(image, kind, **options):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()
