import pickle
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

from helpers import datasets, simulate

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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way_return_the_same_images(folder, pixels, method):
    dataset = datasets.PngDataset(folder, transforms.PILToTensor())
    loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context=method)
    images = torch.cat([images for images, _ in loader])
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), pixels)


def test_the_pickled_dataset_has_no_pixels_in_it(folder):
    assert len(pickle.dumps(datasets.PngDataset(folder))) < 2_000


@pytest.mark.parametrize("damage", ["truncated", "one byte changed", "no PNG", "empty"])
def test_a_damaged_png_is_named(folder, damage):
    path = folder / "00007.png"
    content = path.read_bytes()
    changed = content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]
    path.write_bytes({"truncated": content[:-400], "one byte changed": changed, "no PNG": b"<html>", "empty": b""}[damage])
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


def test_slow_storage_returns_the_bytes_on_disk_and_not_too_early(folder):
    storage = simulate.SlowStorage(seconds_per_open=0.02, bytes_per_second=1e6)
    path = folder / "00000.png"
    start = time.perf_counter()
    content = storage.read(path)
    assert time.perf_counter() - start >= 0.02 + len(content) / 1e6
    assert content == path.read_bytes()


def test_items_of_the_sleeping_dataset_say_who_made_them_and_when():
    loader = DataLoader(datasets.SleepDataset(6, 0.001), batch_size=2, num_workers=3)
    items = torch.cat([items for items, _ in loader]).numpy()
    assert items[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert (items[:, 2] - items[:, 1] >= 0.001).all()


def test_a_hiccup_takes_its_own_time():
    dataset = datasets.SleepDataset(4, 0.0, hiccup_every=4, hiccup_seconds=0.2)
    durations = [float(item[2] - item[1]) for item, _ in (dataset[index] for index in range(4))]
    assert durations[3] >= 0.2 > max(durations[:3])
