from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from helpers.data import cifar10
from helpers.loading import datasets, packs

pytestmark = pytest.mark.processes


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path))
    return cifar10.prepare(drawn=(300, 10), download=False)


def pack_names(data):
    return sorted(path.name for path in (data.train.parents[1] / "packs").iterdir() if not path.name.startswith("."))


def test_a_pack_has_the_images_and_labels_of_the_png_files_and_is_made_once(data, capsys):
    packed, files = packs.prepare(data), datasets.PngDataset(data.train, v2.PILToTensor())
    assert packs.prepare(data).path == packed.path and capsys.readouterr().out.count("Packed") == 1
    assert len(packed) == len(files)
    for index in range(len(files)):
        assert torch.equal(packed[index][0], files[index][0]) and packed[index][1] == files[index][1]


def test_other_images_in_the_same_folder_are_packed_anew_and_replace_the_old_pack(data):
    before = packs.prepare(data)
    Image.new("RGB", (32, 32), (9, 9, 9)).save(data.train / "00000.png")
    manifest = data.train.parent / "manifest.json"
    manifest.write_text(f"{manifest.read_text()} ")
    after = packs.prepare(data)
    assert after.path != before.path
    assert after[0][0].unique().tolist() == [9]
    assert len(pack_names(data)) == 1


def test_a_damaged_image_leaves_no_pack(data):
    (data.train / "00250.png").write_bytes(b"no image")
    with pytest.raises(datasets.UnreadableImage, match="00250"):
        packs.prepare(data)
    assert pack_names(data) == []


def test_of_callers_that_want_a_pack_at_once_one_makes_it(data, capsys):
    with ThreadPoolExecutor(3) as threads:
        folders = {pack.path for pack in threads.map(packs.prepare, [data] * 3)}
    assert len(folders) == len(pack_names(data)) == capsys.readouterr().out.count("Packed") == 1


def test_new_loaders_have_the_same_order_of_full_batches_of_bytes_and_epochs_have_another(data):
    packed = packs.prepare(data)
    one, two = packs.loader(packed, 100), packs.loader(packed, 128)
    assert [(images.shape, images.dtype, labels.dtype) for images, labels in two] == [
        ((128, 3, 32, 32), torch.uint8, torch.int64)
    ] * 2
    first, second = next(iter(one)), next(iter(packs.loader(packed, 100)))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(next(iter(one))[0], first[0])
