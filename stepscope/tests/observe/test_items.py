"""Facts of loading items, most of them by a clock on which only sleeping and working take time."""

import cProfile
import gc
import importlib
import os
import re
import subprocess
import sys
import time
import warnings
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support import loops
from support.clock import Busy, once
from torch.utils.data import DataLoader, IterableDataset
from torchvision.transforms import v2

from stepscope.facts.loader import ANY, IRREGULAR, Irregular
from stepscope.observe import apart, items

pytestmark = pytest.mark.processes  # a second or more each

PHOTO, FILE = Image.effect_noise((1600, 1200), 50).convert("RGB"), BytesIO()
PHOTO.save(FILE, "jpeg")


@pytest.mark.parametrize(
    ("part", "load"),
    [
        ("decoding", lambda index: np.array(Image.open(FILE).convert("RGB").crop((0, 0, 8, 8)))),
        ("resizing", lambda index: np.array(v2.Resize(64)(PHOTO))),
    ],
)
def test_decoding_and_resizing_are_found(quick, monkeypatch, part, load):
    monkeypatch.setattr(items, "cProfile", SimpleNamespace(Profile=lambda *_: cProfile.Profile(time.thread_time)))
    parts = items.load(DataLoader(loops.Calls(load), 2)).parts
    assert max(parts, key=parts.get) == part


def test_opening_and_reading_small_files_are_found(clock):
    def read_file():
        clock.sleep(0.004)
        return Path(__file__).read_bytes()

    loaded = items.load(DataLoader(Busy(clock, 0, read_file), 8))
    assert (loaded.ms, loaded.cpu_ms, loaded.opened) == pytest.approx((4, 0, 1), abs=1e-6)
    assert loaded.reading > 0.99 and loaded.small_files


def test_irregular_items_are_found_with_their_share(clock):
    loaded = items.load(DataLoader(loops.SleepDataset(10_000, 0.0001, 64, 0.2), 8), longer=True)
    assert loaded.irregular.share == pytest.approx(0.2 / 0.2063, abs=0.01)
    assert (loaded.irregular.usual_ms, loaded.irregular.slowest_ms) == pytest.approx((0.1, 200))
    assert int(loaded.irregular.slowest) % 64 == 63


@pytest.mark.parametrize("at", [0, 1, 10, 30, 50])
@pytest.mark.parametrize("where", ["items", "whole batches", "collating", "a stream"])
def test_an_interruption_at_any_time_changes_nothing(clock, where, at):
    class Whole(Busy):
        def __getitems__(self, indices):
            clock.work(0.01 * len(indices))
            return [self[index] for index in indices]

    class Streamed(Busy, IterableDataset):
        def __iter__(self):
            return map(self.__getitem__, range(len(self)))

    def load(late):
        interrupted = once(clock, late, at)
        if where == "collating":
            return items.load(DataLoader(Busy(clock, 0.01), 2, collate_fn=interrupted))
        if where == "a stream":
            return items.load(DataLoader(Streamed(clock, 0.01, interrupted), 2))
        return items.load(DataLoader((Whole if where == "whole batches" else Busy)(clock, 0.01, interrupted), 2))

    usual, loaded = load(0), load(0.835)
    assert loaded.ms == pytest.approx(usual.ms, rel=0.01)
    assert (loaded.irregular, loaded.waits) == (Irregular(), {})
    assert loaded.parts == pytest.approx(usual.parts, abs=0.01)


@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_short_interruption_by_other_processes_is_not_a_wait_of_the_items(clock, at):
    """It takes as long as an item, most of which others have the cores."""
    interrupted = once(clock, 0.029, at)
    loaded = items.load(DataLoader(Busy(clock, 0.003, lambda: (clock.hold(0.027), interrupted())), 2))
    assert (loaded.ms, loaded.cpu_ms) == pytest.approx((3, 3), rel=0.01)
    assert loaded.waits == {}


def test_time_in_which_the_sampler_is_held_is_not_a_wait_of_the_items(clock):
    loaded = items.load(DataLoader(Busy(clock, 0.003, lambda: clock.hold_sampler(0.002)), 2))
    assert (loaded.ms, loaded.cpu_ms) == pytest.approx((3, 3), rel=0.01)
    assert loaded.waits == {}


def test_items_wait_at_least_as_long_as_they_sleep_however_long_the_sampler_is_held(clock):
    def sleeps():
        clock.sleep(0.002)
        clock.queued_sampler += 0.002  # while the item sleeps, the sampler is ready to work, and nobody waits for it

    loaded = items.load(DataLoader(Busy(clock, 0.001, sleeps), 2))
    assert (loaded.ms, loaded.cpu_ms) == pytest.approx((3, 1), rel=0.01)


@pytest.mark.parametrize(("in_slow_items", "in_collating"), [(0.0, 0.01), (0.1, 0.0)])
def test_irregular_items_are_found_while_other_processes_have_the_cores(clock, in_slow_items, in_collating):
    class Slow(loops.SleepDataset):
        def __getitem__(self, index):
            clock.hold(in_slow_items if index % 64 == 63 else 0)
            return super().__getitem__(index)

    slow = Slow(10_000, 0.0001, hiccup_every=64, hiccup_seconds=0.3)
    loaded = items.load(DataLoader(slow, 8, collate_fn=lambda batch: clock.hold(in_collating)))
    assert (loaded.irregular.share, loaded.waiting) == pytest.approx((0.3 / 0.3064, 0), abs=0.05)
    assert loaded.irregular.slowest_ms == pytest.approx(300, rel=0.01)


def start(index):
    subprocess.run([sys.executable, "-I", "-S", "-c", "sum(range(500_000))"], check=True)


def wait(index):
    time.sleep(0.05 if index % 64 == 63 else 0)


@pytest.mark.parametrize(("load", "works", "name"), [(start, True, ANY), (wait, False, IRREGULAR)])
def test_programs_that_items_start_are_work_and_irregular_items_have_a_line(quick, load, works, name):
    loaded = items.load(DataLoader(loops.Calls(load), 1))
    assert (loaded.cpu_ms == loaded.ms) == works
    assert loaded.lines[name].startswith(f"test_items.py:{load.__code__.co_firstlineno + 1}:")
    assert ", called at loops.py:" in loaded.lines[name]


@pytest.mark.parametrize(("times", "again"), [(1, 0), (2, 0.5)])
def test_files_that_an_item_opens_again_are_counted(quick, tmp_path, times, again):
    for number in range(8):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{number}.png")

    def load(index):
        for _ in range(times):
            np.asarray(Image.open(tmp_path / f"{index % 8}.png"))

    before = open
    assert items.load(DataLoader(loops.Calls(load), 2, collate_fn=len)).opened_again == again
    assert open is before


def test_pytorchs_own_warnings_are_noted_even_if_it_gave_them_before(quick):
    def warns(index):
        return torch.tensor([np.zeros(4), np.ones(4)])

    warns(0)
    loaded = items.load(DataLoader(loops.Calls(warns), 2))
    assert any("list of numpy.ndarrays" in text and "Triggered" not in text for text in loaded.warnings)
    assert not torch.is_warn_always_enabled()
    assert items.load(DataLoader(loops.Calls(lambda index: warnings.warn("mine", stacklevel=1)), 2)).warnings == ()


SHOP = """
import hashlib

class Compose:
    def __call__(self, value):
        for each in (Shift(), Blur()):
            value = each(value)
        return value

class Shift:
    def __call__(self, value):
        return value

class Blur:
    def __call__(self, value):
        hashlib.sha256(bytes(4 << 20))  # without the GIL: also on a busy machine the sampler sees it
        return value

class Data:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return Compose()(index)

class Alone(Data):
    def __getitem__(self, index):
        return Blur()(index)
"""


@pytest.mark.parametrize("name", ["Data", "Alone"])
def test_without_a_line_of_the_user_the_transform_is_named_and_its_package_known(quick, tmp_path, monkeypatch, name):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    shop = importlib.import_module("shop")
    loaded = items.load(DataLoader(getattr(shop, name)(), 2))
    assert loaded.lines[ANY] == "Blur.__call__ of shop"
    assert "shop" in loaded.libraries and not loaded.images
    loaded = items.load(DataLoader(loops.Calls(lambda index: shop.Blur()(index)), 2))
    assert re.match(r"test_items\.py:\d+: .*, in Blur\.__call__ of shop, called at loops\.py:", loaded.lines[ANY])


def test_reads_from_a_file_that_stays_open_are_counted_and_open_no_file(quick, tmp_path):
    file = h5py.File(tmp_path / "rows.h5", "w")
    rows = file.create_dataset("rows", data=np.zeros((100, 4)))

    def load(index):
        return [rows[index % 50 + each] for each in range(3)], rows.file.mode

    loaded = items.load(DataLoader(loops.Calls(load), 2, collate_fn=list))
    assert (loaded.hdf5_reads, loaded.opened) == (3, 0)
    assert "h5py" in loaded.libraries


class Opener(loops.SleepDataset):
    """Opens its file when the first item is asked for, as a dataset should; notes how many threads it has then."""

    file, threads, ended = None, set(), []

    def __getitem__(self, index):
        self.file = self.file or open(os.devnull)
        self.threads.add(torch.get_num_threads())
        return torch.zeros(1), index

    def __del__(self):
        self.ended.append(self)


def test_items_are_loaded_with_one_thread_and_leave_no_file_open(quick):
    dataset, threads = Opener(1000, 0), torch.get_num_threads()
    torch.set_num_threads(2)
    items.load(DataLoader(dataset, 4))
    assert (dataset.threads, torch.get_num_threads(), dataset.file) == ({1}, 2, None)
    gc.collect()
    assert not dataset.ended  # a copy, too, may have deleted what the dataset uses
    torch.set_num_threads(threads)


def adds(index):
    for _ in range(300):
        sum(range(2_000))


def checks(index):
    for _ in range(100):
        sum(range(2_000))


def adds_and_checks(index):
    adds(index)
    checks(index)


def test_the_share_of_the_function_with_the_line_is_known(quick):
    loaded = items.load(DataLoader(loops.Calls(adds_and_checks), 2))
    assert "sum(range" in loaded.lines[ANY]
    assert 0.5 < loaded.function_shares[ANY] < 1  # about three quarters


class Sorted(list):
    """A sampler that chooses the indices of an epoch slowly, and each further index at once."""

    def __iter__(self):
        time.sleep(0.02)
        return super().__iter__()


class OneByOne(list):
    """A sampler that chooses each index slowly."""

    def __iter__(self):
        for index in super().__iter__():
            time.sleep(0.004)
            yield index


def test_the_time_of_a_sampler_is_known_with_its_line(quick):
    times = [items.load(DataLoader(range(8), 2, sampler=each(range(8)))).sampling for each in (list, Sorted, OneByOne)]
    assert [each.name for each in times] == ["list", "Sorted", "OneByOne"]
    quick_ms, at_the_start, for_each = ((each.start_ms, each.batch_ms) for each in times)
    assert at_the_start[0] >= 20 > max(quick_ms) and min(for_each) >= 4
    assert for_each[1] > at_the_start[1]
    assert ["time.sleep(0.0" in each.line for each in times] == [False, True, True]


def test_a_fast_sampler_of_many_indices_is_timed_in_a_moment(quick):
    begin = time.process_time()
    items.load(DataLoader(range(1_000_000), batch_size=None))
    assert time.process_time() - begin < 5  # to add up all times after each index took more


def test_data_read_in_another_process_remain_unread_for_the_script(tmp_path):
    (tmp_path / "items").write_bytes(bytes(range(256)))
    (tmp_path / "log").touch()
    reading, writing = os.pipe()
    os.write(writing, b"an item")
    with (tmp_path / "items").open("rb", buffering=0) as file, (tmp_path / "log").open("a") as log:
        file.read(7)

        def load():
            log.write("loaded")
            log.flush()
            return file.read(3), os.read(reading, 7)

        assert apart.call(load) == (bytes([7, 8, 9]), b"")
        assert (file.read(3), os.read(reading, 7)) == (bytes([7, 8, 9]), b"an item")
    assert (tmp_path / "log").read_text() == "loaded"
