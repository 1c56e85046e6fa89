import pickle

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.clock import Clock
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from helpers import config
from helpers.loading import datasets
from stepscope.base import staging

COUNT = 12


@pytest.fixture
def pixels():
    return np.random.RandomState(0).randint(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path, pixels):
    rows = ["file,label"]
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number:05d}.png")
        rows.append(f"{number:05d}.png,{number % 10}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


DAMAGES = {
    "truncated": lambda content: content[:-200],
    "no image": lambda content: b"<html>",
    "missing": lambda content: None,
}


def put(path, content):
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def test_png_dataset_returns_the_images_and_labels_on_disk(folder, pixels):
    dataset = datasets.PngDataset(folder)
    assert len(dataset) == COUNT
    for index in range(COUNT):
        image, label = dataset[index]
        assert np.array_equal(np.asarray(image), pixels[index])
        assert label == index % 10


@pytest.mark.parametrize("damage", [*DAMAGES, "one byte changed"])
def test_a_damaged_png_is_named(folder, damage):
    dataset = datasets.PngDataset(folder)
    content = (folder / "00007.png").read_bytes()
    changed = content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]
    put(folder / "00007.png", changed if damage == "one byte changed" else DAMAGES[damage](content))
    with pytest.raises(datasets.UnreadableImage, match="00007.png"):
        dataset[7]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda table: table.replace("00004.png,4\n", ""), r"00004\.png"),
        (lambda table: table.replace("00004.png,4", "00004.png,cat"), r"labels\.csv.*cat"),
        (lambda table: table + "99.png,1\n", r"99\.png"),
        (lambda table: table.replace("file,label", "name,class"), r"labels\.csv.*helpers prepare"),
    ],
    ids=["no label", "no number", "no image", "other columns"],
)
def test_labels_that_do_not_fit_the_images_are_named(folder, change, named):
    table = folder / "labels.csv"
    table.write_text(change(table.read_text()))
    with pytest.raises(staging.DamagedFolder, match=named):
        datasets.PngDataset(folder)


@pytest.fixture
def class_folders(tmp_path):
    """Six JPEGs in the classes cat and dog, 90 × 60 pixels or less."""
    names = ("cat/a.jpg", "cat/b.JPEG", "cat/deep-er/c.jpg", "cat/deep/er/d.jpg", "dog/e.jpg", "dog/f.jpg")
    for number, name in enumerate(names):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(90 - 4 * number, 60).save(path)
    return tmp_path / "images"


def photo(width, height):
    corner = np.random.RandomState(width).randint(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(corner).resize((width, height))


def test_jpeg_dataset_returns_what_torchvisions_image_folder_returns(class_folders):
    theirs = ImageFolder(class_folders)
    (class_folders / ".ipynb_checkpoints").mkdir()  # what file browsers leave is passed over
    (class_folders / "cat" / ".thumbnails").mkdir()
    for name in ("cat/._a.jpg", "cat/.thumbnails/a.jpg"):
        (class_folders / name).write_bytes(b"no image")
    ours = datasets.JpegDataset(class_folders)
    assert list(ours.classes) == theirs.classes
    assert [str(ours.path(index)) for index in range(len(ours))] == [path for path, _ in theirs.samples]
    for index in range(len(theirs)):
        assert np.array_equal(ours[index][0], theirs[index][0])
        assert ours[index][1] == theirs[index][1]


def test_datasets_are_pickled_as_spawned_workers_need_them(class_folders, folder):
    jpegs, pngs = datasets.JpegDataset(class_folders, decoder="torchcodec"), datasets.PngDataset(folder)
    for images in (jpegs, pngs):
        assert np.array_equal(pickle.loads(pickle.dumps(images))[3][0], images[3][0])


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG")]
)
def test_images_of_any_colours_become_rgb_as_torchvision_makes_them(tmp_path, mode, kind):
    (tmp_path / "cat").mkdir()
    photo(50, 40).convert(mode).save(tmp_path / "cat" / "a.png", kind)
    assert np.array_equal(datasets.JpegDataset(tmp_path)[0][0], ImageFolder(tmp_path)[0][0])
    decoded = datasets.JpegDataset(tmp_path, decoder="torchcodec")[0][0]
    assert decoded.dtype == torch.uint8
    assert torch.equal(transforms.PILToTensor()(datasets.JpegDataset(tmp_path)[0][0]), decoded)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_by_each_decoder(tmp_path, orientation):
    (tmp_path / "cat").mkdir()
    image = photo(50, 40)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "cat" / "a.jpg", exif=exif)
    upright = transforms.PILToTensor()(ImageOps.exif_transpose(Image.open(tmp_path / "cat" / "a.jpg")))
    for decoder, transform in (("pillow", transforms.PILToTensor()), ("torchcodec", None)):
        assert torch.equal(datasets.JpegDataset(tmp_path, transform, decoder=decoder)[0][0], upright)


@pytest.mark.parametrize(("draft", "width"), [(30, 45), (31, 90)])
def test_draft_mode_decodes_at_a_reduced_size_that_is_large_enough(class_folders, draft, width):
    image = datasets.JpegDataset(class_folders, draft=draft)[0][0]
    assert image.width == width


@pytest.mark.parametrize("options", [{}, {"draft": 16}, {"decoder": "torchcodec"}])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_jpeg_is_named(class_folders, damage, options):
    images = datasets.JpegDataset(class_folders, **options)
    put(images.path(4), DAMAGES[damage](images.path(4).read_bytes()))
    with pytest.raises(datasets.UnreadableImage, match=r"dog.e\.jpg: expected a readable image"):
        images[4]


@pytest.mark.parametrize("options", [{"decoder": "nvjpeg"}, {"decoder": "torchcodec", "draft": 32}])
def test_a_decoder_that_does_not_exist_or_cannot_draft_is_refused(class_folders, options):
    with pytest.raises(ValueError, match="decoder"):
        datasets.JpegDataset(class_folders, **options)


def test_a_folder_without_images_in_class_folders_is_named(tmp_path, class_folders):
    (class_folders / "emu").mkdir()
    for folder in (tmp_path / "nowhere", class_folders / "emu", class_folders):
        with pytest.raises(config.CourseError, match="nowhere|emu"):
            datasets.JpegDataset(folder)


def test_items_of_the_sleeping_dataset_say_who_made_them_and_when():
    loader = DataLoader(datasets.SleepDataset(6, 0.001), batch_size=2, num_workers=3)
    items = torch.cat([items for items, _ in loader]).numpy()
    assert items[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert (items[:, 2] - items[:, 1] >= 0.001).all()


def test_a_hiccup_takes_its_own_time(monkeypatch):
    Clock(monkeypatch, datasets)
    dataset = datasets.SleepDataset(8, 0.25, hiccup_every=4, hiccup_seconds=3)
    durations = [float(item[2] - item[1]) for item, _ in (dataset[index] for index in range(8))]
    assert durations == [0.25, 0.25, 0.25, 3] * 2
