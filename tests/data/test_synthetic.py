"""Drawn images: the same everywhere, like CIFAR-10 in size, and learnable."""

import functools
import hashlib
import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.data import synthetic

# Of the first 1,000 images of seed 2021. If these change, so must the format number in helpers.data.cifar10
PIXELS = "40546ae96fed8c7b5c7c67fcbcb82d091bdf2ab0b34357e1876a75596e4495b9"
# Of the first 20 photos of seed 2021. If these change, so must the format number in helpers.data.photos
PHOTOS = "36904de0202b75fa7c576bc3955b1c27b1d1c35e0fee2b9dd071bee456b46817"
LABELS = [2, 8, 1, 5, 4, 9, 6, 7, 3, 0, 3, 8, 6, 1, 7, 2, 9, 5, 0, 4]

# Of the 5,080 training images of the subset of CIFAR-10 that this project tests with, saved as Pillow saves PNG files
REAL_SIZES = {"mean": 2260, "std": 270, 5: 1738, 25: 2127, 50: 2310, 75: 2450, 95: 2605}  # bytes


def test_pixels_are_the_same_as_ever():
    images, labels = synthetic.draw(1_000, seed=2021)
    assert hashlib.sha256(images.tobytes()).hexdigest() == PIXELS
    assert labels[:20].tolist() == LABELS


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(first=st.integers(0, 2_000), count=st.integers(0, 600))
def test_an_image_depends_on_its_number_only(first, count):
    images, labels = synthetic.draw(count, seed=7, first=first)
    assert np.array_equal(images, _from_the_start()[0][first : first + count])
    assert np.array_equal(labels, _from_the_start()[1][first : first + count])


def test_another_seed_draws_other_images():
    one, two = (synthetic.draw(100, seed)[0] for seed in (1, 2))
    assert not (one == two).all(axis=(1, 2, 3)).any()


def test_no_image_is_drawn_twice():
    images, _ = synthetic.draw(5_000, seed=3)
    assert len({image.tobytes() for image in images}) == 5_000


def test_every_ten_images_show_every_class_once():
    _, labels = synthetic.draw(5_000, seed=4)
    assert (np.sort(labels.reshape(-1, 10)) == np.arange(10)).all()


def test_classes_come_in_random_order():
    _, labels = synthetic.draw(5_000, seed=4)
    counts = np.stack([np.bincount(place, minlength=10) for place in labels.reshape(-1, 10).T])
    assert counts.min() > 20 and counts.max() < 90  # 50 of each class in each of the ten places, if chance rules


@pytest.mark.processes
@pytest.mark.parametrize(("what", "tolerance"), [("mean", 0.02), ("std", 0.1), (5, 0.05), (50, 0.03), (95, 0.03)])
def test_png_files_are_as_large_as_those_of_cifar10(what, tolerance, png_sizes):
    found = getattr(png_sizes, what)() if isinstance(what, str) else np.percentile(png_sizes, what)
    assert found == pytest.approx(REAL_SIZES[what], rel=tolerance)


@pytest.mark.slow
def test_a_small_network_learns_from_the_first_2560_images():
    torch = pytest.importorskip("torch")
    from helpers.training import models

    def batches(count, seed):
        images, labels = synthetic.draw(count, seed)
        images = torch.from_numpy(images).permute(0, 3, 1, 2)
        return zip(images.split(128), torch.from_numpy(labels).split(128), strict=True)

    torch.manual_seed(0)
    model = models.SmallCNN(normalize=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for images, labels in batches(2_560, seed=1):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        right = [(model(images).argmax(1) == labels).float().mean() for images, labels in batches(1_024, seed=2)]
    assert 0.15 < float(torch.stack(right).mean()) < 0.9  # chance is 0.1, give or take 0.01


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


def test_every_ten_photos_show_every_class_once(some_photos):
    labels = np.array([label for _, label in some_photos])
    assert (np.sort(labels.reshape(-1, 10)) == np.arange(10)).all()


def test_photos_saved_as_jpeg_are_as_large_as_photos(some_photos):
    sizes = [len(_encoded(image, "JPEG", quality=90)) for image, _ in some_photos]
    assert min(sizes) > 20_000 and max(sizes) < 90_000
    assert 40_000 < np.median(sizes) < 50_000


def test_another_seed_draws_other_photos():
    assert synthetic.draw_photo(0, seed=1)[0].tobytes() != synthetic.draw_photo(0, seed=2)[0].tobytes()


def test_drawing_does_not_import_torch():
    code = "import sys; from helpers.data import synthetic; synthetic.draw(1, 0); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture(scope="module")
def png_sizes():
    images, _ = synthetic.draw(4_000, seed=2021)
    return np.array([len(_encoded(image, "PNG")) for image in images])


@pytest.fixture(scope="module")
def some_photos():
    return [synthetic.draw_photo(number, seed=2021) for number in range(100)]


def _encoded(image, kind, **options):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


@functools.cache
def _from_the_start():
    return synthetic.draw(2_600, seed=7)
