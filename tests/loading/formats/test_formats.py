"""Every format gives back what was packed, in every kind of process, and nothing else when a file is damaged."""

import multiprocessing
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import packs
from torch.utils.data import DataLoader

from helpers.loading import formats
from helpers.loading.formats import parquet

COUNT = 30
LABELS = [number * number - 50 for number in range(COUNT)]
KINDS = list(packs.KINDS)
NPY = formats.FORMATS["npy"]
IMAGE = np.zeros((3, 2, 2), np.uint8)
UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

shapes = st.tuples(st.sampled_from([1, 3, 4]), st.integers(1, 9), st.integers(1, 9))


@pytest.fixture(scope="module", params=KINDS)
def packed(request, tmp_path_factory):
    """A dataset with images of one shape, of each kind; and what was packed."""
    images = packs.images(*[(3, 8, 6)] * COUNT)
    return packs.pack(request.param, images, LABELS, tmp_path_factory.mktemp("packed") / "pack"), images


@st.composite
def samples(draw):
    """Images of one shape or several, their labels, and indices of a batch."""
    count = draw(st.integers(1, 12))
    some = [draw(shapes)] * count if draw(st.booleans()) else [draw(shapes) for _ in range(count)]
    labels = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=count, max_size=count))
    return packs.images(*some), labels, draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=20))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, suppress_health_check=UNHURRIED)
@given(samples())
def test_every_format_gives_back_what_was_packed_in_any_order(tmp_path, kind, sample):
    images, labels, indices = sample
    shutil.rmtree(tmp_path / "pack", ignore_errors=True)
    dataset = packs.pack(kind, images, labels, tmp_path / "pack")
    assert len(dataset) == len(images)
    assert all(packs.same(dataset[index], images[index], labels[index]) for index in indices)
    for _ in range(2):  # npy checks an image only once; and what was read may be changed
        batch = dataset.__getitems__(indices)
        assert len(batch) == len(indices)
        assert all(packs.same(got, images[i], labels[i]) for got, i in zip(batch, indices, strict=True))
        for image, _ in [*batch, dataset[indices[0]]]:
            image.zero_()


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, formats.ByItem])
def test_torch_puts_samples_together_as_always(packed, wrap):
    dataset, images = packed
    for collate in (dataset.collate, None):
        read, labels = next(iter(DataLoader(wrap(dataset), COUNT, collate_fn=collate)))
        assert np.array_equal(read, np.stack(images)) and read.dtype == torch.uint8
        assert labels.dtype == torch.int64 and labels.tolist() == LABELS


def test_wrong_indices_are_refused_and_name_the_pack(packed):
    dataset, _ = packed
    for index in (COUNT, -COUNT - 1):
        for read in (lambda index=index: dataset[index], lambda index=index: dataset.__getitems__([0, index])):
            with pytest.raises(IndexError, match=rf"pack: .*{index}"):
                read()
    for read in (lambda: dataset[1.0], lambda: dataset.__getitems__([1.0])):
        with pytest.raises(TypeError):
            read()
    assert sum(1 for _ in dataset) == COUNT


def test_a_pack_is_shared_copied_closed_and_pickled(packed, tmp_path):
    dataset, images = packed
    another = type(dataset)(dataset.path)
    assert packs.same(another[1], images[1], LABELS[1]) and packs.same(dataset[2], images[2], LABELS[2])
    shutil.copytree(dataset.path, tmp_path / "copy")
    assert packs.same(type(dataset)(tmp_path / "copy")[9], images[9], LABELS[9])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 300 and packs.same(pickle.loads(pickled)[4], images[4], LABELS[4])
    another.close()
    for _ in range(2):
        dataset.close()
    assert packs.same(dataset[1], images[1], LABELS[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_handle_crosses_a_fork(packed):
    """Two datasets of one file: HDF5 gives out the handle that it has, if one of them is still open."""
    dataset, images = packed
    both = dataset, type(dataset)(dataset.path)
    before = [packs.same(one[9], images[9], LABELS[9]) and one._opened for one in both]
    child = os.fork()
    if child == 0:
        right = all(packs.same(one[index], images[index], LABELS[index]) for one in both for index in (0, 9))
        if dataset.format == "hdf5":
            os.lseek(dataset._opened[0].id.get_vfd_handle(), 77, os.SEEK_SET)  # who shares a file shares its offset
        os._exit(not (right and not any(one._opened is old for one, old in zip(both, before, strict=True))))
    assert os.waitpid(child, 0)[1] == 0
    assert dataset._opened is before[0]
    if dataset.format == "hdf5":
        assert os.lseek(before[0][0].id.get_vfd_handle(), 0, os.SEEK_CUR) != 77
    assert packs.same(dataset[0], images[0], LABELS[0])


def test_tensors_and_images_that_are_no_block_of_memory_are_packed_as_they_look(tmp_path):
    image = torch.arange(60, dtype=torch.uint8).reshape(4, 5, 3).permute(2, 0, 1)[:, ::2]
    NPY.pack([image], torch.tensor([5]), tmp_path / "pack")
    assert packs.same(NPY.PackedDataset(tmp_path / "pack")[0], image.numpy(), 5)


@pytest.mark.parametrize(
    ("images", "labels", "named"),
    [
        ([], [], "image"),
        ([IMAGE, IMAGE], [1], "shorter"),
        ([IMAGE, IMAGE[0]], [1, 2], r"image 1 .*\(2, 2\)"),
        ([IMAGE.astype(np.float32)], [1], "image 0 .*float32"),
        ([IMAGE], [1.5], "label 0 .*1.5"),
        ([IMAGE], [2**63], "label 0 .*9223372036854775808"),
    ],
)
def test_what_cannot_be_packed_is_named_and_leaves_nothing(tmp_path, images, labels, named):
    with pytest.raises(ValueError, match=named):
        NPY.pack(iter(images), iter(labels), tmp_path / "pack")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not limit a process's data")
def test_memory_stays_flat_while_packing_and_reading(tmp_path):
    """100 MB of images, more than LMDB's first map, in a process that may take no more than half of that."""

    def pack_and_read(kind, count):
        image = np.random.RandomState(0).randint(0, 256, (3, 200, 200), dtype=np.uint8)
        dataset = packs.pack(kind, (image for _ in range(count)), range(count), tmp_path / f"{kind} {count}")
        for index in range(count):
            dataset[index]
        dataset.close()

    def limited():
        import resource

        for kind in KINDS:
            pack_and_read(kind, 20)
        data = int(re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (data + 50_000_000,) * 2)
        for kind in KINDS:
            pack_and_read(kind, 850)

    process = multiprocessing.get_context("fork").Process(target=limited)
    process.start()
    process.join()
    assert process.exitcode == 0


# Damage: an error of ours that names the file, or the exact images

DAMAGES = {
    "missing": lambda content, place: None,
    "cut off": lambda content, place: content[:place],
    "changed": lambda content, place: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("kind", "size"), [*((kind, 40) for kind in KINDS), ("lmdb", 5)])  # small: inside its tree
def test_a_damaged_pack_yields_an_error_that_names_the_file_or_the_exact_images(tmp_path, kind, size, damage):
    images = packs.images(*[(3, size, size)] * 6)
    dataset_class = type(packs.pack(kind, images, range(6), tmp_path / "pack"))
    named = set()
    for file in sorted((tmp_path / "pack").iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), len(content) // 7 + 1):
            shutil.copytree(tmp_path / "pack", tmp_path / "copy")
            (tmp_path / "copy" / file.name).unlink()
            damaged = DAMAGES[damage](content, place)
            if damaged is not None:
                (tmp_path / "copy" / file.name).write_bytes(damaged)
            try:
                dataset = dataset_class(tmp_path / "copy")
                for index in range(6):
                    for sample in (dataset[index], dataset.__getitems__([0, index])[1]):
                        assert packs.same(sample, images[index], index), f"{file.name}, {place}"
            except formats.DamagedPack as error:
                assert file.name in str(error)
                named.add(file.name)
            shutil.rmtree(tmp_path / "copy")
    assert named == {file.name for file in (tmp_path / "pack").iterdir()}


def test_folders_that_are_no_packs_of_this_format_say_what_they_are(tmp_path):
    with pytest.raises(formats.DamagedPack, match="manifest.jsonl: no such file"):
        NPY.PackedDataset(tmp_path)
    formats.FORMATS["tar"].pack([IMAGE], [1], tmp_path / "pack")
    with pytest.raises(ValueError, match=r"format npy.*found tar"):
        formats.FORMATS["npy"].PackedDataset(tmp_path / "pack")


# Orders


def test_shuffled_batches_have_each_index_once_and_follow_torchs_seed():
    def order():
        torch.manual_seed(3)
        batches = list(formats.ShuffledBatches(100, 8))
        assert [len(batch) for batch in batches] == [8] * 12 + [4]
        return np.concatenate(batches).tolist()

    assert order() == order() != list(range(100)) and sorted(order()) == list(range(100))


def test_batches_of_row_groups_have_each_index_once_and_read_few_groups(tmp_path):
    dataset = packs.pack("parquet", packs.images(*[(1, 2, 2)] * 350), range(350), tmp_path / "pack")
    batches = list(parquet.RowGroupBatches(dataset, 56))
    assert all(len(np.unique(batch // 7)) <= 8 for batch in batches)
    assert np.concatenate(batches).tolist() != list(range(350))
    loader = DataLoader(dataset, batch_sampler=parquet.RowGroupBatches(dataset, 56), collate_fn=dataset.collate)
    assert sorted(torch.cat([labels for _, labels in loader]).tolist()) == list(range(350))
