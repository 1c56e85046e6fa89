import os
import pickle
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import packs
from torch.utils.data import DataLoader, Dataset, Subset

from helpers.loading import formats
from helpers.loading.formats import parquet

COUNT = 30
FIXED = [(3, 8, 6)] * COUNT
VARYING = [(3, 1 + number % 5, 2 + number % 3) for number in range(COUNT)]
LABELS = [number * number - 50 for number in range(COUNT)]
KINDS = list(packs.KINDS)
FORMATS = list(formats.FORMATS)

numbers = st.integers(-(2**63), 2**63 - 1)
sides = st.integers(1, 9)
shapes = st.tuples(st.sampled_from([1, 3, 4]), sides, sides)


@pytest.fixture(scope="module", params=KINDS)
def packed(request, tmp_path_factory):
    """A dataset with images of one shape and numbers, of each kind; and what was packed."""
    images = packs.images(*FIXED)
    dataset = packs.pack(request.param, images, LABELS, tmp_path_factory.mktemp("packed") / "pack")
    return dataset, images, LABELS


def batch_is_right(batch, images, labels, indices):
    return len(batch) == len(indices) and all(
        packs.same(sample, images[index], labels[index]) for sample, index in zip(batch, indices, strict=True)
    )


@st.composite
def samples(draw):
    """Images and labels, of one shape or several, with numbers or images as labels."""
    count = draw(st.integers(1, 12))
    fixed, pairs = draw(st.booleans()), draw(st.booleans())

    def some_images(seed):
        return packs.images(*[draw(shapes)] * count if fixed else [draw(shapes) for _ in range(count)], seed=seed)

    labels = some_images(1) if pairs else draw(st.lists(numbers, min_size=count, max_size=count))
    indices = draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=20))
    return some_images(0), labels, indices


UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=UNHURRIED)
@given(samples())
def test_every_format_gives_back_what_was_packed_in_any_order(tmp_path, kind, sample):
    images, labels, indices = sample
    path = tmp_path / "pack"
    shutil.rmtree(path, ignore_errors=True)
    with packs.pack(kind, images, labels, path) as dataset:
        assert len(dataset) == len(images)
        assert all(packs.same(dataset[index], images[index], labels[index]) for index in indices)
        assert batch_is_right(dataset.__getitems__(indices), images, labels, indices)


class SideBySide(Dataset):
    """The batches of several packs of the same: to start workers for each of them would take long."""

    def __init__(self, datasets):
        self.datasets = datasets

    def __len__(self):
        return len(self.datasets[0])

    def __getitems__(self, indices):
        return [dataset.__getitems__(indices) for dataset in self.datasets]

    def collate(self, batches):
        return [dataset.collate(batch) for dataset, batch in zip(self.datasets, batches, strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way_return_what_was_packed(tmp_path, method):
    images = packs.images(*FIXED)
    kinds = {name: name if name in KINDS else f"{name} raw" for name in FORMATS}
    datasets = [packs.pack(kind, images, LABELS, tmp_path / name) for name, kind in kinds.items()]
    for dataset in datasets:
        assert packs.same(dataset[3], images[3], LABELS[3])  # so that there is a handle to inherit
    together = SideBySide(datasets)
    loader = DataLoader(together, 4, num_workers=2, multiprocessing_context=method, collate_fn=together.collate)
    for name, dataset, batches in zip(kinds, datasets, zip(*loader, strict=True), strict=True):
        found, labels = zip(*batches, strict=True)
        assert packs.equal(torch.cat(found), np.stack(images)), name
        assert torch.cat(labels).tolist() == LABELS, name
        assert packs.same(dataset[3], images[3], LABELS[3]), name


def test_torch_puts_samples_together_as_always(packed):
    dataset, images, labels = packed
    found_images, found_labels = next(iter(DataLoader(dataset, COUNT)))
    assert packs.equal(found_images, np.stack(images))
    assert found_labels.dtype == torch.int64 and found_labels.tolist() == labels


def test_batches_that_are_ready_are_the_same_as_those_torch_puts_together(packed):
    dataset, images, labels = packed
    (found_images, found_labels) = next(iter(DataLoader(dataset, COUNT, collate_fn=dataset.collate)))
    assert packs.equal(found_images, np.stack(images))
    assert found_labels.dtype == torch.int64 and found_labels.tolist() == labels


def test_a_subset_reads_batches(packed):
    dataset, images, _ = packed
    subset = Subset(dataset, [5, 9, 2])
    (found, _) = next(iter(DataLoader(subset, 3, collate_fn=dataset.collate)))
    assert packs.equal(found, np.stack([images[5], images[9], images[2]]))


def test_by_item_reads_the_same(packed):
    dataset, images, _ = packed
    found, _ = next(iter(DataLoader(formats.ByItem(dataset), COUNT, collate_fn=dataset.collate)))
    assert packs.equal(found, np.stack(images))


def test_what_was_read_may_be_changed(packed):
    dataset, images, _ = packed
    dataset[4][0].zero_()
    dataset.__getitems__([4, 5]).images.zero_()
    assert packs.equal(dataset[4][0], images[4])
    assert packs.equal(dataset.__getitems__([4, 5]).images, np.stack(images[4:6]))


@pytest.mark.parametrize("index", [COUNT, -COUNT - 1, 10**12])
def test_an_index_beyond_the_end_is_an_index_error_that_names_pack_and_index(packed, index):
    dataset, _, _ = packed
    with pytest.raises(IndexError, match=rf"pack: there is no item {index}"):
        dataset[index]
    with pytest.raises(IndexError, match=rf"pack: there is no item {index}"):
        dataset.__getitems__([0, index])


@pytest.mark.parametrize("index", [1.0, "1", None, slice(2)])
def test_an_index_that_is_no_whole_number_is_a_type_error(packed, index):
    dataset, _, _ = packed
    with pytest.raises(TypeError):
        dataset[index]
    with pytest.raises(TypeError):
        dataset.__getitems__([index])


def test_indices_may_be_of_numpy_or_torch(packed):
    dataset, images, labels = packed
    assert packs.same(dataset[np.int32(7)], images[7], labels[7])
    assert packs.same(dataset[torch.tensor(7)], images[7], labels[7])
    assert batch_is_right(dataset.__getitems__(torch.tensor([7, -1])), images, labels, [7, -1])
    assert batch_is_right(dataset.__getitems__(np.array([7, 8], np.uint8)), images, labels, [7, 8])


def test_indices_of_a_small_type_reach_the_end(tmp_path):
    formats.npy.pack(np.zeros((300, 1, 1, 1), np.uint8), range(300), tmp_path / "pack")
    dataset = formats.npy.PackedDataset(tmp_path / "pack")
    assert dataset.__getitems__(np.array([-1], np.int8)).labels.tolist() == [299]


def test_a_dataset_is_a_sequence(packed):
    dataset, images, labels = packed
    assert all(packs.same(*each) for each in zip(dataset, images, labels, strict=True))


def test_a_closed_dataset_opens_again(packed):
    dataset, images, labels = packed
    dataset.close()
    dataset.close()
    assert packs.same(dataset[1], images[1], labels[1])


def test_several_datasets_of_a_process_share_a_pack(packed):
    dataset, images, labels = packed
    with type(dataset)(dataset.path) as another:
        assert packs.same(another[1], images[1], labels[1])
        assert packs.same(dataset[2], images[2], labels[2])
    assert packs.same(dataset[3], images[3], labels[3])


def test_a_copied_pack_is_a_pack(packed, tmp_path):
    dataset, images, labels = packed
    shutil.copytree(dataset.path, tmp_path / "copy")
    copy = type(dataset)(tmp_path / "copy")
    assert all(packs.same(copy[index], images[index], labels[index]) for index in range(COUNT))


@pytest.mark.parametrize("name", FORMATS)
def test_a_pickled_dataset_has_neither_pixels_nor_labels_nor_handles(tmp_path, name):
    count = 2_000
    formats.FORMATS[name].pack(np.zeros((count, 1, 1, 1), np.uint8), range(count), tmp_path / "pack")
    dataset = formats.FORMATS[name].PackedDataset(tmp_path / "pack")
    dataset.__getitems__([1, 2])
    assert len(pickle.dumps(dataset)) < 300
    assert pickle.loads(pickle.dumps(dataset))[count - 1][1] == count - 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_handle_crosses_a_fork(packed):
    """Two datasets, opened in the parent; the child finds its own, while the parent still has its."""
    dataset, images, labels = packed
    other = type(dataset)(dataset.path)
    before = dataset._handle(), other._handle()
    child = os.fork()
    if child == 0:
        try:
            right = all(
                packs.same(each[index], images[index], labels[index]) for each in (dataset, other) for index in (0, 29)
            )
            mine = dataset._handle() is not before[0] and other._handle() is not before[1]
            os._exit(0 if right and mine else 1)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert dataset._handle() is before[0]
    assert packs.same(dataset[0], images[0], labels[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_file_of_hdf5_that_was_open_before_a_fork_is_opened_anew(tmp_path):
    """HDF5 gives out the handle that it has, if a file is open; it would have one of the other dataset's."""
    formats.hdf5.pack([IMAGE], [1], tmp_path / "pack")
    datasets = [formats.hdf5.PackedDataset(tmp_path / "pack") for _ in range(2)]
    parents = datasets[0]._handle()[0].id.get_vfd_handle()
    assert datasets[1][0][1] == 1
    child = os.fork()
    if child == 0:
        mine = datasets[0]._handle()[0].id.get_vfd_handle()
        os.lseek(mine, 77, os.SEEK_SET)  # who shares an open file shares its offset
        os._exit(0)
    os.waitpid(child, 0)
    assert os.lseek(parents, 0, os.SEEK_CUR) != 77


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_are_packed_as_arrays_are(tmp_path, name):
    images, labels = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2), torch.tensor([4, 5])
    formats.FORMATS[name].pack(images, labels, tmp_path / "pack")
    dataset = formats.FORMATS[name].PackedDataset(tmp_path / "pack")
    assert packs.same(dataset[1], images[1].numpy(), 5)


@pytest.mark.parametrize("name", FORMATS)
def test_images_that_are_no_block_of_memory_are_packed_as_they_look(tmp_path, name):
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3).transpose(2, 0, 1)[:, ::2]
    formats.FORMATS[name].pack([image], [0], tmp_path / "pack")
    assert packs.same(formats.FORMATS[name].PackedDataset(tmp_path / "pack")[0], image, 0)


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be packed

IMAGE = np.zeros((3, 2, 2), np.uint8)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ([], [], "at least one image"),
        ([IMAGE, IMAGE], [1], "image 1 has none"),
        ([IMAGE], [], "image 0 has none"),
        ([IMAGE], [1, 2], "more labels"),
        ([], [1], "at least one image"),
        ([IMAGE, IMAGE[0]], [1, 2], r"image 1 .*\(2, 2\)"),
        ([IMAGE.astype(np.float32)], [1], "image 0 .*float32"),
        ([IMAGE[:, :0]], [1], r"image 0 .*\(3, 0, 2\)"),
        ([[[[0]]]], [1], "image 0 .*list"),
        ([IMAGE], ["cat"], "label 0 .*'cat'"),
        ([IMAGE], [1.5], "label 0 .*1.5"),
        ([IMAGE], [2**63], "label 0 .*9223372036854775808"),
        ([IMAGE, IMAGE], [1, IMAGE], "label 1 "),
        ([IMAGE, IMAGE], [IMAGE, 1], "label 1 .*int"),
        ([IMAGE], [IMAGE.astype(int)], "label 0 .*int64"),
    ],
)
def test_what_cannot_be_packed_is_named_and_leaves_nothing(tmp_path, name, images, labels, message):
    with pytest.raises(formats.UnusableSamples, match=message):
        formats.FORMATS[name].pack(iter(images), iter(labels), tmp_path / "pack")
    assert not list(tmp_path.iterdir())


def test_png_names_a_number_of_channels_that_it_has_not(tmp_path):
    with pytest.raises(formats.UnusableSamples, match="1 to 4 channels, found 5"):
        formats.lmdb.pack([np.zeros((5, 2, 2), np.uint8)], [1], tmp_path / "pack", codec="png")


@pytest.mark.parametrize("name", FORMATS)
def test_an_existing_folder_is_refused_by_name_and_stays(tmp_path, name):
    path = tmp_path / "pack"
    path.mkdir()
    with pytest.raises(formats.PackExists, match="pack: expected nothing here"):
        formats.FORMATS[name].pack([IMAGE], [1], path)
    assert list(tmp_path.iterdir()) == [path] and not list(path.iterdir())


def test_a_pack_made_meanwhile_by_another_process_is_not_replaced(tmp_path):
    path = tmp_path / "pack"

    def images():
        yield IMAGE
        formats.npy.pack([IMAGE + 9], [9], path)

    with pytest.raises(formats.PackExists):
        formats.npy.pack(images(), [1], path)
    assert packs.same(formats.npy.PackedDataset(path)[0], IMAGE + 9, 9)


@pytest.mark.parametrize("name", FORMATS)
def test_an_error_of_the_images_leaves_nothing(tmp_path, name):
    def images():
        yield IMAGE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        formats.FORMATS[name].pack(images(), [1, 2], tmp_path / "pack")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_killed_packing_leaves_nothing_under_the_name_and_the_next_one_removes_what_it_left(tmp_path, name):
    code = (
        "import sys, time, numpy as np\n"
        "from helpers.loading import formats\n"
        "def images():\n"
        "    for _ in range(3000): yield np.zeros((3, 32, 32), np.uint8)\n"
        "    print('half', flush=True)\n"
        "    time.sleep(600)\n"
        "formats.FORMATS[sys.argv[1]].pack(images(), range(6000), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, name, str(tmp_path / "pack")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "pack").exists() and list(tmp_path.iterdir())
    formats.FORMATS[name].pack([IMAGE], [1], tmp_path / "pack")
    assert list(tmp_path.iterdir()) == [tmp_path / "pack"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not limit a process's data")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_flat_while_packing_and_reading(tmp_path, kind):
    """100 MB of images, more than LMDB's first map, in a process that may take no more than half of that."""
    code = (
        "import pathlib, re, resource, sys, numpy as np\n"
        "import packs\n"
        "def pack(name, count):\n"
        "    image = np.random.RandomState(0).randint(0, 256, (3, 200, 200), dtype=np.uint8)\n"
        "    images, path = (image for _ in range(count)), pathlib.Path(sys.argv[2], name)\n"
        "    with packs.pack(sys.argv[1], images, range(count), path) as dataset:\n"
        "        for index in range(count): dataset[index]\n"
        "pack('little', 20)\n"
        "data = int(re.search(r'VmData:\\s*(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (data + 50_000_000,) * 2)\n"
        "pack('much', 850)\n"
    )
    command = [sys.executable, "-c", code, kind, str(tmp_path)]
    process = subprocess.run(command, env=packs.environment(), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Folders that are no packs of this format


def test_a_folder_without_manifest_is_no_pack(tmp_path):
    with pytest.raises(formats.DamagedPack, match="manifest.json: no such file"):
        formats.npy.PackedDataset(tmp_path)


def test_a_pack_of_another_format_says_which(tmp_path):
    formats.tar.pack([IMAGE], [1], tmp_path / "pack")
    with pytest.raises(formats.WrongFormat, match="expected a pack of format zip, version 1, found tar"):
        formats.zipped.PackedDataset(tmp_path / "pack")


# ---------------------------------------------------------------------------------------------------------------------
# What single formats do


def test_shards_are_several_and_none_is_much_larger_than_asked(tmp_path):
    for name in ("tar", "zip", "tfrecord"):
        formats.FORMATS[name].pack(packs.images(*[(3, 32, 32)] * 50), range(50), tmp_path / name, shard_bytes=40_000)
        sizes = [file.stat().st_size for file in (tmp_path / name).glob("shard-*." + name)]
        assert len(sizes) > 3
        assert max(sizes) < 60_000


def test_lmdb_has_no_lock_file_and_opens_on_a_disk_that_is_read_only(tmp_path):
    formats.lmdb.pack([IMAGE], [1], tmp_path / "pack")
    names = {file.name for file in (tmp_path / "pack").iterdir()}
    assert names == {"data.mdb", "tree-pages.npy", "manifest.json"}


def test_shuffled_batches_have_each_index_once():
    batches = list(formats.ShuffledBatches(10, 4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(np.concatenate(batches)) == list(range(10))
    assert len(formats.ShuffledBatches(10, 4)) == 3


def test_shuffled_batches_follow_torchs_seed():
    def order():
        torch.manual_seed(3)
        return np.concatenate(list(formats.ShuffledBatches(100, 8))).tolist()

    assert order() == order() != list(range(100))


def test_batches_of_row_groups_have_each_index_once_and_read_few_groups(tmp_path):
    parquet.pack(packs.images(*[(1, 2, 2)] * 200), range(200), tmp_path / "pack", rows_per_group=4)
    dataset = parquet.PackedDataset(tmp_path / "pack")
    batches = list(parquet.RowGroupBatches(dataset, 32))
    assert sorted(np.concatenate(batches)) == list(range(200))
    assert all(len(np.unique(batch // 4)) <= 8 for batch in batches)
    assert np.concatenate(batches).tolist() != list(range(200))
    loader = DataLoader(dataset, batch_sampler=parquet.RowGroupBatches(dataset, 32), collate_fn=dataset.collate)
    assert sorted(torch.cat([labels for _, labels in loader]).tolist()) == list(range(200))


def test_parquet_keeps_few_row_groups_in_memory(tmp_path):
    parquet.pack(packs.images(*[(1, 100, 100)] * 200), range(200), tmp_path / "pack", rows_per_group=4)
    with parquet.PackedDataset(tmp_path / "pack") as dataset:
        before = pyarrow.total_allocated_bytes()
        assert [label for _, label in dataset] == list(range(200))
        assert pyarrow.total_allocated_bytes() - before < 1e6  # of 2 MB


@pytest.mark.processes
def test_importing_the_package_imports_no_format():
    code = "import sys; from helpers.loading import formats; "
    code += "print({'h5py', 'pyarrow', 'lmdb', 'lz4'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_batches_are_the_same_when_all_has_been_read_before(packed):
    """npy then gathers without asking: whatever an index may be, what comes back or is raised stays the same."""
    dataset, images, labels = packed
    dataset.__getitems__(range(COUNT))
    for chosen in ([3, 3, 0], [-1, 2], np.array([4, -COUNT], np.int32), np.array([1, 2], np.uint64), range(2)):
        batch, numbers = dataset.__getitems__(chosen), [int(number) for number in chosen]
        assert packs.equal(batch.images, np.stack([images[number] for number in numbers]))
        assert batch.labels.tolist() == [labels[number] for number in numbers]
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=rf"pack: there is no item {index}"):
            dataset.__getitems__([0, index])
    for wrong in ([1.0], [True, False], []):
        with pytest.raises((TypeError, IndexError)):
            dataset.__getitems__(wrong)
    assert len(pickle.dumps(dataset)) < 10_000
    dataset.close()
    assert packs.equal(dataset.__getitems__([5]).images, np.stack(images[5:6]))
