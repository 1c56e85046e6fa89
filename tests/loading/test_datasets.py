import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from support.clock import Clock
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from helpers import simulate
from helpers.data import photos, stores
from helpers.loading import datasets, formats

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


def test_png_dataset_returns_the_images_and_labels_on_disk(folder, pixels):
    dataset = datasets.PngDataset(folder)
    assert len(dataset) == COUNT
    for index in range(COUNT):
        image, label = dataset[index]
        assert np.array_equal(np.asarray(image), pixels[index])
        assert label == index % 10


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way_return_the_same_images(folder, pixels, method):
    dataset = datasets.PngDataset(folder, transforms.PILToTensor())
    loader = DataLoader(dataset, batch_size=5, num_workers=1, multiprocessing_context=method)
    images = torch.cat([images for images, _ in loader])
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), pixels)


def test_the_pickled_dataset_has_no_pixels_in_it(folder):
    assert len(pickle.dumps(datasets.PngDataset(folder))) < 2_000


@pytest.mark.parametrize("damage", ["truncated", "one byte changed", "no PNG", "empty"])
def test_a_damaged_png_is_named(folder, damage):
    path = folder / "00007.png"
    content = path.read_bytes()
    changed = content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]
    damages = {"truncated": content[:-400], "one byte changed": changed, "no PNG": b"<html>", "empty": b""}
    path.write_bytes(damages[damage])
    with pytest.raises(datasets.UnreadableImage, match="00007.png"):
        datasets.PngDataset(folder)[7]


def test_a_png_that_vanishes_is_named(folder):
    dataset = datasets.PngDataset(folder)
    (folder / "00003.png").unlink()
    with pytest.raises(datasets.UnreadableImage, match="00003.png"):
        dataset[3]


def test_an_image_without_a_label_is_named(folder):
    table = folder / "labels.csv"
    table.write_text(table.read_text().replace("00004.png,4\n", ""))
    with pytest.raises(datasets.BadLabels, match=r"00004\.png.*no label"):
        datasets.PngDataset(folder)


def test_a_label_without_an_image_is_named(folder):
    (folder / "00005.png").unlink()
    with pytest.raises(datasets.BadLabels, match=r"00005\.png.*no such image"):
        datasets.PngDataset(folder)


@pytest.mark.parametrize("row", ["00004.png,", "00004.png", "00004.png,cat", "00004.png,-1"])
def test_a_label_that_is_no_class_number_is_named(folder, row):
    table = folder / "labels.csv"
    table.write_text(table.read_text().replace("00004.png,4", row))
    with pytest.raises(datasets.BadLabels, match=r"labels\.csv.*00004\.png"):
        datasets.PngDataset(folder)


@pytest.mark.parametrize("content", ["", "file,label\n", "name,class\n00000.png,1\n"])
def test_a_table_of_labels_without_rows_or_columns_is_named(folder, content):
    (folder / "labels.csv").write_text(content)
    with pytest.raises(datasets.BadLabels, match=r"labels\.csv"):
        datasets.PngDataset(folder)


def test_a_folder_without_labels_says_how_to_make_them(tmp_path):
    with pytest.raises(datasets.BadLabels, match="helpers prepare"):
        datasets.PngDataset(tmp_path)


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
    ours, theirs = datasets.JpegDataset(class_folders), ImageFolder(class_folders)
    assert list(ours.classes) == theirs.classes
    assert [str(ours.path(index)) for index in range(len(ours))] == [path for path, _ in theirs.samples]
    for index in range(len(theirs)):
        assert np.array_equal(ours[index][0], theirs[index][0])
        assert ours[index][1] == theirs[index][1]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way_return_the_same_jpegs(class_folders, method):
    images = datasets.JpegDataset(class_folders, transforms.CenterCrop(40), decoder="torchvision")
    loader = DataLoader(images, batch_size=2, num_workers=1, multiprocessing_context=method)
    assert torch.equal(torch.cat([images for images, _ in loader]), torch.stack([image for image, _ in images]))


def test_both_decoders_return_the_same_pixels(class_folders):
    ours, theirs = (datasets.JpegDataset(class_folders, decoder=decoder)[0][0] for decoder in ("pillow", "torchvision"))
    assert torch.equal(transforms.PILToTensor()(ours), theirs)


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("1", "PNG"), ("RGBA", "PNG"), ("LA", "PNG")]
)
def test_images_of_any_colours_become_rgb_as_torchvision_makes_them(tmp_path, mode, kind):
    (tmp_path / "cat").mkdir()
    photo(50, 40).convert(mode).save(tmp_path / "cat" / "a.png", kind)
    assert np.array_equal(datasets.JpegDataset(tmp_path)[0][0], ImageFolder(tmp_path)[0][0])
    decoded = datasets.JpegDataset(tmp_path, decoder="torchvision")[0][0]
    assert decoded.shape == (3, 40, 50) and decoded.dtype == torch.uint8


@pytest.mark.parametrize("options", [{}, {"draft": 32}, {"decoder": "torchvision"}])
def test_an_image_of_one_pixel_can_be_resized(tmp_path, options):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (1, 1), (200, 30, 40)).save(tmp_path / "cat" / "a.jpg")
    image = datasets.JpegDataset(tmp_path, transforms.Resize(32), **options)[0][0]
    assert image.size == (32, 32) if not options.get("decoder") else image.shape == (3, 32, 32)


@pytest.mark.parametrize(("draft", "width"), [(30, 45), (15, 23), (31, 90), (None, 90)])
def test_draft_mode_decodes_at_a_reduced_size_that_is_large_enough(class_folders, draft, width):
    image = datasets.JpegDataset(class_folders, draft=draft)[0][0]
    assert image.width == width


@pytest.mark.parametrize("options", [{}, {"draft": 16}, {"decoder": "torchvision"}])
@pytest.mark.parametrize("damage", ["truncated", "no image", "empty", "missing"])
def test_a_damaged_jpeg_is_named(class_folders, damage, options):
    images = datasets.JpegDataset(class_folders, **options)
    content = images.path(4).read_bytes()
    images.path(4).write_bytes({"truncated": content[:-200], "no image": b"<html>"}.get(damage, b""))
    if damage == "missing":
        images.path(4).unlink()
    with pytest.raises(datasets.UnreadableImage, match=r"dog.e\.jpg: expected a readable image"):
        images[4]


def test_the_pickled_jpeg_dataset_has_no_pixels_and_no_python_strings_in_it(class_folders):
    images = datasets.JpegDataset(class_folders)
    assert len(pickle.dumps(images)) < 2_000
    assert images.files.dtype.kind == "S" and images.labels.dtype == np.int64


@pytest.mark.parametrize("options", [{"decoder": "nvjpeg"}, {"decoder": "torchvision", "draft": 32}])
def test_a_decoder_that_does_not_exist_or_cannot_draft_is_refused(class_folders, options):
    with pytest.raises(ValueError, match="decoder"):
        datasets.JpegDataset(class_folders, **options)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(photos.BadFolder, match="nowhere: no such folder"):
        datasets.JpegDataset(tmp_path / "nowhere")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(photos.BadFolder, match=f"{tmp_path.name}: .*found no folder"):
        datasets.JpegDataset(tmp_path)


def test_images_without_class_folders_are_counted(tmp_path):
    photo(9, 9).save(tmp_path / "a.jpg")
    with pytest.raises(photos.BadFolder, match="found no folder and 1 image"):
        datasets.JpegDataset(tmp_path)


def test_a_class_folder_without_images_is_named(class_folders):
    (class_folders / "emu").mkdir()
    (class_folders / "emu" / "notes.txt").write_text("none yet")
    with pytest.raises(photos.BadFolder, match="emu: .*found none"):
        datasets.JpegDataset(class_folders)


def test_what_file_browsers_leave_is_passed_over(class_folders):
    (class_folders / ".ipynb_checkpoints").mkdir()
    (class_folders / "cat" / ".thumbnails").mkdir()
    for name in ("cat/._a.jpg", "cat/.thumbnails/a.jpg"):
        (class_folders / name).write_bytes(b"no image")
    assert len(datasets.JpegDataset(class_folders)) == 6


@pytest.mark.parametrize(("indices", "requests"), [([4, 2, 3], 1), ([0, 2, 4], 3), ([5, 0, 1], 2), ([1, 1, 2], 1)])
def test_neighbours_in_a_pack_on_slow_storage_come_with_one_request(tmp_path, monkeypatch, indices, requests):
    images = np.arange(6 * 12, dtype=np.uint8).reshape(6, 3, 2, 2)
    formats.npy.pack(images, range(6), tmp_path / "pack")
    clock = Clock(monkeypatch, datasets, simulate)
    storage = simulate.SlowStorage(seconds_per_open=10, bytes_per_second=12)
    late = datasets.OnSlowStorage(formats.npy.PackedDataset(tmp_path / "pack"), storage, image_bytes=12)
    batch = late.__getitems__(indices)
    assert np.array_equal(batch.images, images[indices])
    assert clock.now == requests * 10 + 3  # s
    assert len(late) == 6


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


def test_an_object_an_image_is_read_by_several_requests_at_a_time(tmp_path):
    place = stores.Folder(tmp_path)
    names, pixels = [], np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    for number, image in enumerate(pixels):
        content = io.BytesIO()
        Image.fromarray(image).save(content, "PNG")
        names.append(f"{number}.png")
        place.connect().put(names[-1], content.getvalue())
    objects = datasets.ImageObjects(place, names, list(range(6)), threads=3)
    assert objects.store is None  # each process connects for itself
    images, labels = next(iter(DataLoader(objects, 6)))
    assert np.array_equal(images.permute(0, 2, 3, 1), pixels) and labels.tolist() == list(range(6))
    image, label = datasets.image_and_label({"png": content.getvalue(), "cls": memoryview(b"5")})
    assert np.array_equal(image.permute(1, 2, 0), pixels[5]) and label == 5
