"""The benchmark goes on where another library cannot, and says so; and it compares what does the same.

What it measures is nobody's test.
"""

import tomllib

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from helpers import config, training
from tests.bench import bench_augmentation, peers, shard_peers, timing

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 1e-9)
    monkeypatch.setattr(timing, "rest", lambda: None)


def breaks_off():
    yield [1, 2], None
    raise RuntimeError("no\nshard")


def test_the_extra_installs_what_is_compared():
    project = tomllib.loads((config.PROJECT / "pyproject.toml").read_text())["project"]
    extra = {Requirement(wanted).name for wanted in project["optional-dependencies"]["peers"]}
    compared = {peer.package for peer in (*peers.PEERS, *peers.AUGMENTING, *shard_peers.PEERS.values())}
    assert extra == compared - {"numpy", "obstore"}  # these two the course needs itself


def test_a_library_that_fails_is_named_in_one_line_and_the_others_are_timed(capsys):
    ours, theirs = timing.Variant([([1, 2], None)]), timing.Variant(breaks_off, beside="ours")
    rates = timing.interleaved({"ours": ours, "theirs": theirs, "limit": ours})
    assert {name: len(measured) for name, measured in rates.items()} == {"ours": timing.ROUNDS, "limit": timing.ROUNDS}
    assert capsys.readouterr().out == "theirs failed: RuntimeError: no shard\n"


def test_a_failure_of_ours_stops_the_benchmark():
    with pytest.raises(RuntimeError, match="shard"):
        timing.interleaved({"ours": timing.Variant(breaks_off)})


def test_libraries_that_are_not_installed_are_named_in_one_line_with_the_way_to_install_them(monkeypatch, capsys):
    monkeypatch.setattr(peers, "installed", lambda _: [])
    assert peers.variants(peers.Source([], [], None, {}, None)) == {}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ot installed" in line]
    assert "webdataset" in line and "kornia" not in line and peers.INSTALL in line


def test_the_report_has_the_ratio_of_each_library_to_ours(capsys):
    variants = {"ours": timing.Variant([]), "theirs": timing.Variant([], beside="ours")}
    timing.report_beside({"ours": [300.0, 200.0, 400.0], "theirs": [100.0, 100.0, 100.0]}, variants)
    assert "3.0× (2.0 – 4.0)" in capsys.readouterr().out


def test_a_variant_may_name_the_limit_that_its_ratio_is_to(capsys):
    variants = {"naive": timing.Variant([]), "floats": timing.Variant([], limit="naive"), "limit": timing.Variant([])}
    timing.report({"naive": [200.0], "floats": [100.0], "limit": [1000.0]}, variants)
    to_limit = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]}
    assert to_limit == {"naive": "0.200", "floats": "0.500", "limit": "1.000"}


def test_a_batch_with_other_labels_is_no_comparison():
    images = torch.zeros(peers.BATCH, *peers.SHAPE, dtype=torch.uint8)
    source = peers.Source(images[:1].numpy(), np.array([3]), None, {}, None)
    peers.check(images, torch.full((peers.BATCH,), 3), source)
    with pytest.raises(ValueError, match="labels"):
        peers.check(images, torch.full((peers.BATCH,), 4), source)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Random images, packed with their numbers as labels."""
    torch.manual_seed(0)
    images = torch.randint(256, (2 * timing.BATCH, *peers.SHAPE), dtype=torch.uint8).numpy()
    return bench_augmentation.packed(images, tmp_path_factory.mktemp("numbered"))


@pytest.fixture
def batch(numbered):
    """A batch, augmented as the benchmark does, and its labels."""
    torch.manual_seed(0)
    return bench_augmentation.crop_and_flip(numbered.packs["npy"].__getitems__(range(timing.BATCH)))


def test_each_way_to_augment_gives_the_images_with_a_draw_for_each(numbered):
    torch.manual_seed(0)
    assert len(bench_augmentation.all_variants(numbered)) == 4  # each is checked


def test_images_between_0_and_1_are_compared_with_the_bytes(numbered, batch):
    images, labels = batch
    bench_augmentation.check(images / 255, labels, numbered)


def test_a_pixel_that_is_not_the_images_is_no_comparison(numbered, batch):
    images, labels = batch
    images[7, 1, 16, 16] ^= 1
    with pytest.raises(ValueError, match="found others"):
        bench_augmentation.check(images, labels, numbered)


def test_images_with_the_labels_of_others_are_no_comparison(numbered, batch):
    images, labels = batch
    with pytest.raises(ValueError, match="found others"):
        bench_augmentation.check(images, labels.flip(0), numbered)


def shifted_together(images):
    """Both offsets of an image are the same: each way they look right."""
    offsets = torch.arange(len(images)) % 9
    padded = torch.nn.functional.pad(images, 4 * [4])
    moved = [image[:, at : at + 32, at : at + 32] for image, at in zip(padded, offsets.tolist(), strict=True)]
    return torch.stack([each.flip(2) if number % 2 else each for number, each in enumerate(moved)])


@pytest.mark.parametrize(
    "augment",
    [
        bench_augmentation.IMAGE_BY_IMAGE,  # one draw for the batch
        bench_augmentation.IMAGE_BY_IMAGE.transforms[1],  # no crop
        lambda images: torch.stack([bench_augmentation.IMAGE_BY_IMAGE.transforms[0](each) for each in images]),
        lambda images: training.crop_and_flip(images, padding=3),
        shifted_together,
    ],
    ids=["a draw for all", "not moved", "not mirrored", "moved less", "offsets that are the same each way"],
)
def test_augmentation_without_a_draw_for_each_image_is_no_comparison(numbered, augment):
    torch.manual_seed(0)
    images = numbered.packs["npy"].__getitems__(range(timing.BATCH)).images
    with pytest.raises(ValueError, match="a draw for each image"):
        bench_augmentation.check(augment(images), torch.arange(timing.BATCH), numbered)
