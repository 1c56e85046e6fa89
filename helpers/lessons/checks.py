"""Checks of code that the reader writes in a notebook: each runs it, and says at once what it expected and found.

A check asks for behaviour, never for a text: whatever gives the right result is right. Each takes what was written in
the cell above it, a function, a class or a file, prints a line, and returns whether that is right. It never shows a
solution.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import pickle
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from helpers.training import launching
from helpers.wording import counted, milliseconds

LIMIT = 120.0  # seconds for a job of two ranks; on two cores one takes 12 s, beside ten busy processes up to 58 s
CLOCKS_AGREE = 0.5  # a share; two clocks around the same work differ by what lies between them, more so when busy


class Wrong(Exception):
    """What was written does something else; the message says what was expected and what was found."""


def _placeholder() -> None: ...


def _answered(check: Callable[..., str]) -> Callable[..., bool]:
    """Let a check that returns praise, or raises `Wrong`, print its answer and return whether it is right."""

    @functools.wraps(check)
    def answered(written: Callable, *others: object) -> bool:
        if _unwritten(written):
            print("Nothing to check yet: write the code in the cell above, run it, then run this cell again.")
            return False
        try:
            print(f"Right: {check(written, *others)}")
        except Wrong as wrong:
            print(f"Not yet: {wrong}")
            return False
        except Exception as error:
            print(f"Not yet: it raised {type(error).__name__}: {error}{_line_of(error, written)}")
            return False
        return True

    return answered


def _unwritten(written: object) -> bool:
    """Whether the placeholder is still there: `...`, a function of it, or a class with a method of it."""
    if isinstance(written, type):
        return any(map(_unwritten, _methods(written)))
    code = getattr(written, "__code__", None)
    return written is ... or written is None or (code is not None and code.co_code == _placeholder.__code__.co_code)


def _methods(written: type) -> list[Callable]:
    return [each for name, each in vars(written).items() if callable(each) and name != "__init__"]


def _line_of(error: Exception, written: object) -> str:
    """Return where in the reader's code an error came from, "" if it came from elsewhere."""
    functions = [*_methods(written), written.__init__] if isinstance(written, type) else [written]
    files = {each.__code__.co_filename for each in functions if hasattr(each, "__code__")}
    trace, line = error.__traceback__, None
    while trace:
        if trace.tb_frame.f_code.co_filename in files:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line} of your cell)" if line else ""


def _expect(right: bool, message: str) -> None:
    if not right:
        raise Wrong(message)


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return found.shape == expected.shape and torch.allclose(found.float(), expected.float(), tolerance, tolerance)


# ------------------------------------------------------------------------------------------- what the checks work on


class _Slow(Dataset):
    """Items that take a while."""

    def __init__(self, seconds: float):
        self.seconds, self.taken = seconds, 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        self.taken += 1
        return torch.zeros(3), torch.tensor(0)


class _Clock:
    """A simulated clock: it goes on only when something is said to take time, so no answer depends on this machine."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


class _Waits:
    """A loader of numbered batches, each with a wait of its own, in milliseconds."""

    def __init__(self, clock: _Clock, waits: Sequence[float]):
        self.clock, self.waits = clock, waits

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, wait in enumerate(self.waits):
            self.clock.now += wait / 1e3
            yield torch.full((4, 3), float(number)), torch.full((4,), number)


class _Machine:
    """A machine on which a loop takes known times, while what else it does changes.

    Parameters
    ----------
    ms : dict of int to float
        Of a step of the loop, for each number of workers.
    slower : range
        Among all batches, of whatever loader, those that take three times as long, since others are at work.
    """

    START, STEP, AHEAD = 0.3, 1.0, 2  # seconds for each worker; ms of a step; batches ready for each worker

    def __init__(self, ms: dict[int, float], slower: range = range(0)):
        self.ms, self.slower, self.clock = ms, slower, _Clock()
        self.taken: list[int] = []  # for each batch: the workers of its loader
        self.steps = 0

    def new_loader(self, workers: int) -> _Simulated:
        if workers not in self.ms:
            raise Wrong(f"expected one of the numbers {sorted(self.ms)}, found a loader of {workers!r}.")
        return _Simulated(self, workers)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.steps += 1
        self.clock.now += self.STEP / 1e3

    def turns(self) -> list[int]:
        """Return the loaders' workers in the order in which they were timed."""
        return [workers for workers, _ in itertools.groupby(self.taken)]


class _Simulated:
    """A loader of a simulated machine."""

    def __init__(self, machine: _Machine, workers: int):
        self.machine, self.num_workers = machine, workers

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        machine, workers, batch = self.machine, self.num_workers, (torch.zeros(4, 3), torch.zeros(4))
        for number in range(len(self)):
            waits = 0.0 if 0 < number <= machine.AHEAD * workers else (machine.ms[workers] - machine.STEP) / 1e3
            waits *= 3 if len(machine.taken) in machine.slower else 1
            machine.clock.now += waits + (machine.START * workers if number == 0 else 0)
            machine.taken.append(workers)
            yield batch


def _network() -> nn.Sequential:
    """Return a small network without batch normalization, of always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def _batches(count: int, images: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [
        (torch.rand(images, 3, 8, 8, generator=drawn), torch.randint(10, (images,), generator=drawn))
        for _ in range(count)
    ]


def _new_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _network()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine.detach() - expected.detach()).abs().max()) for mine, expected in pairs)


# ---------------------------------------------------------------------------------------------------------- the checks


@_answered
def items_per_second(written: Callable[[Dataset, int], float]) -> str:
    """Notebook 00: ``written(dataset, count)`` reads `count` items and returns how many that is a second."""
    dataset = _Slow(0.004)
    start = time.perf_counter()
    found = written(dataset, 50)
    seconds = time.perf_counter() - start
    _expect(isinstance(found, (int, float)), f"expected a number, found {found!r}.")
    _expect(dataset.taken == 50, f"expected 50 items to be read, found {counted(dataset.taken, 'item')}.")
    expected = 50 / seconds
    close = abs(found - expected) <= CLOCKS_AGREE * expected
    _expect(close, f"50 items took {seconds:.2f} s, so expected {expected:.0f} items/s, found {found:.4g}.")
    return f"{found:.0f} items/s of a dataset that takes {milliseconds(4)} or more for each."


@_answered
def share_of_waiting(written: Callable[[list[dict]], float]) -> str:
    """Notebook 01: ``written(events)`` returns the share of the steps, 0 to 1, in which the loop waits for data."""
    for title, waits, steps, gpu in (
        ("a trace of two steps", [8_000, 2_000], [10_000, 6_000], False),
        ("the trace of a GPU", [300, 500, 100], [2_000, 3_000, 1_000], True),
        ("a trace without waiting", [0.0, 0.0], [5_000, 5_000], False),
    ):
        found, expected = written(_events(waits, steps, gpu)), sum(waits) / sum(steps)
        _expect(isinstance(found, (int, float)), f"{title}: expected a share, a number from 0 to 1, found {found!r}.")
        _expect(
            abs(found - expected) < 1e-9,
            f"{title}: its steps take {sum(steps):,} µs in all, and the loop waits for {sum(waits):,} µs of them. "
            f"Expected a share of {expected:.4f}, found {found:.4f}.",
        )
    return "three traces, one of them of a GPU, give the shares that they should."


def _events(waits: Sequence[float], steps: Sequence[float], gpu: bool) -> list[dict]:
    """Return the events of a trace as `torch.profiler` writes them, with steps in which the loop waits for a batch."""
    events, now = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}], 0.0
    loading = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    for number, (wait, length) in enumerate(zip(waits, steps, strict=True), 4):
        mark = {"ph": "X", "name": f"ProfilerStep#{number}", "ts": now, "dur": length}
        events += [
            {"ph": "X", "cat": "user_annotation", "name": loading, "pid": 1, "tid": 1, "ts": now, "dur": wait},
            {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "pid": 1, "tid": 1, "ts": now + wait, "dur": 90.0},
            mark | {"cat": "user_annotation", "pid": 1, "tid": 1},
            *([mark | {"cat": "gpu_user_annotation", "pid": 0, "tid": 7, "dur": length / 4}] if gpu else []),
        ]
        now += length
    return [*events, {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": now}]


@_answered
def host_waits(written: Callable) -> str:
    """Notebook 02: ``written(loader, step, clock)`` loops, and returns the share of the time in which it waits."""
    clock, waits, steps, taken = _Clock(), [900, 4, 4, 40, 4, 4, 40, 4], [200, 20, 20, 20, 40, 20, 20, 20], []

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        taken.append(int(labels[0]) if torch.is_tensor(labels) else labels)
        clock.now += steps[len(taken) - 1] / 1e3

    found = written(_Waits(clock, waits), step, clock)
    _expect(taken == list(range(len(waits))), f"expected a step with each of {len(waits)} batches, found {taken}.")
    _expect(isinstance(found, (int, float)), f"expected a share, a number from 0 to 1, found {found!r}.")
    _expect(clock.looks > 0, "nobody looked at the clock that was given.")
    expected = sum(waits[1:]) / (sum(waits[1:]) + sum(steps[1:]))
    close = abs(found - expected) < 1e-6
    _expect(
        close,
        f"after the first step the loop waited for {sum(waits[1:])} ms and stepped for {sum(steps[1:])} ms; before it, "
        f"it waited for {waits[0]} ms. Expected a share of {expected:.3f}, found {found:.3f}.",
    )
    return f"the host waits for {found:.0%} of the time, once the loop is running."


@_answered
def best_workers(written: Callable) -> str:
    """Notebook 03: ``written(new_loader, step, candidates, clock)`` returns the best number of workers."""
    quiet, other = {0: 20.0, 1: 16.0, 2: 8.0, 4: 12.0}, {0: 20.0, 1: 8.0, 2: 12.0, 4: 15.0}
    for title, machine in (
        ("a quiet machine", _Machine(quiet)),
        ("a machine on which others begin to work meanwhile", _Machine(quiet, range(110, 1_000_000))),
        ("a machine on which others end their work meanwhile", _Machine(other, range(195))),
    ):
        candidates = list(machine.ms)
        found = written(machine.new_loader, machine.step, candidates, machine.clock)
        timed = {workers: machine.taken.count(workers) for workers in candidates}
        _expect(machine.clock.looks > 0, "nobody looked at the clock that was given.")
        _expect(
            min(timed.values()) >= 50,
            f"expected 5 rounds of 10 batches for each number, found {timed[min(timed, key=timed.get)]} batches "
            f"for {counted(min(timed, key=timed.get), 'worker')}.",
        )
        _expect(
            2 * machine.steps >= len(machine.taken),
            f"expected a step with each batch, found {machine.steps} for {len(machine.taken)} batches.",
        )
        turns = machine.turns()
        _expect(
            len(turns) >= 3 * len(candidates),
            f"expected rounds, in each of which all numbers have their turn. Found the order {_listed(turns)}: what "
            "others do on the machine meanwhile then affects one number and not the next.",
        )
        _expect(found in candidates, f"expected one of the candidates {candidates}, found {found!r}.")
        best = min(machine.ms, key=machine.ms.get)
        _expect(
            found == best,
            f"{title}: expected {best}, found {found!r}. There a loader's first batch takes {machine.START} s for each "
            f"worker that starts, and {machine.AHEAD} batches for each worker are then ready at once: none of these "
            "says how fast the loop will be.",
        )
    return "the best number on three machines, also while others begin or end their work there."


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")


class _BrightAtLast:
    """Three batches of bytes, the last one smaller and brighter; it notes how many are in memory at once."""

    def __init__(self) -> None:
        self.most = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        drawn, alive = torch.Generator().manual_seed(0), weakref.WeakSet()
        for count, darkest in ((50, 0), (50, 20), (7, 180)):
            images = torch.randint(darkest, 256, (count, 3, 8, 6), dtype=torch.uint8, generator=drawn)
            images[:, 1] //= 2  # the channels differ
            images[:, 2] = 255 - images[:, 2] // 4
            alive.add(images)
            self.most = max(self.most, len(alive))
            yield images, torch.zeros(count, dtype=torch.int64)
            del images


@_answered
def mean_and_std(written: Callable) -> str:
    """Notebook 04: ``written(loader)`` returns each channel's mean and standard deviation of all bytes, from 0 to 1."""
    pixels = torch.cat([images for images, _ in _BrightAtLast()]).double() / 255
    expected = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3), correction=0)
    loader = _BrightAtLast()
    found = written(loader)
    _expect(
        isinstance(found, Sequence) and len(found) == 2,
        f"expected the mean and the standard deviation, found {type(found).__name__}.",
    )
    for name, mine, right in zip(("mean", "standard deviation"), found, expected, strict=True):
        mine = torch.as_tensor(mine, dtype=torch.float64).flatten()
        _expect(len(mine) == 3, f"expected a {name} for each of 3 channels, found {counted(len(mine), 'number')}.")
        _expect(
            bool((mine - right).abs().max() < 1e-3),
            f"expected a {name} of {_three(right)}, found {_three(mine)}. Each pixel counts alike, and the last batch "
            "has fewer; bytes go from 0 to 255, and their squares do not fit into bytes.",
        )
    _expect(
        loader.most <= 2,
        f"{loader.most} of 3 batches were in memory at once; those of a whole dataset may not fit.",
    )
    return f"mean {_three(found[0])}, standard deviation {_three(found[1])}, with one batch in memory at a time."


def _three(numbers: Sequence[float]) -> str:
    return ", ".join(f"{float(each):.4f}" for each in numbers)


@_answered
def resize(written: Callable) -> str:
    """Notebook 05: ``written(path, side)`` returns a photo whose shorter side has `side` pixels, upright, in RGB."""
    with tempfile.TemporaryDirectory() as name:
        for title, size, mode, turned in (
            ("a wide photo", (640, 400), "RGB", False), ("a high photo", (400, 640), "RGB", False),
            ("a grey photo", (512, 512), "L", False), ("a photo of a camera held upright", (640, 400), "RGB", True),
        ):  # fmt: skip
            photo, path = _disc(size, mode), Path(name) / "photo.jpg"
            exif = photo.getexif()
            exif[0x0112] = 6 if turned else 1  # orientation; 6: to be turned by a quarter
            photo.save(path, quality=95, exif=exif)
            found = written(path, 100)
            _expect(isinstance(found, Image.Image), f"{title}: expected a PIL image, found {type(found).__name__}.")
            width, height = size[::-1] if turned else size
            expected = tuple(round(100 * each / min(size)) for each in (width, height))
            _expect(found.mode == "RGB", f"{title}: expected the mode RGB, found {found.mode}.")
            right = all(abs(mine - other) <= 1 for mine, other in zip(found.size, expected, strict=True))
            _expect(right, f"{title} of {width} × {height}: expected {expected} pixels, found {found.size}.")
            pixels = np.asarray(found.convert("L"), float)
            difference = np.abs(pixels - np.asarray(_disc(found.size, "L"), float)).mean()
            _expect(
                difference < 8, f"{title}: its content has moved, or was stretched: pixels differ by {difference:.0f}."
            )
    return "four photos, with their shapes kept."


def _disc(size: tuple[int, int], mode: str) -> Image.Image:
    """Return a picture of a disc in the middle, as wide as half of the shorter side."""
    across, down = np.meshgrid(*(np.arange(length) - (length - 1) / 2 for length in size))
    pixels = np.where(np.hypot(across, down) < min(size) / 4, 220, 30).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def packed_images(file: Path) -> bool:
    """Notebook 06: a file with `PackedImages`, a dataset over an array in a file that reads a batch at once."""
    return _check_file(file, "PackedImages", _packed_images)


def _check_file(file: Path, name: str, check: Callable[..., bool], *others: object) -> bool:
    """Check what a file defines under a name, or say why there is no such thing."""
    try:
        written = getattr(_imported(file), name)
    except FileNotFoundError:
        print(f"Nothing to check yet: there is no file {file}. Run the cell above, which writes it.")
        return False
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
        where = f" (line {lines[-1]})" if lines else ""
        print(f"Not yet: no {name} can be imported from {file.name}: {type(error).__name__}: {error}{where}")
        return False
    return check(written, *others)


def _imported(file: Path) -> ModuleType:
    """Import a file as it is now, under its own name, so that a worker that is spawned can import it, too."""
    importlib.invalidate_caches()
    sys.modules.pop(file.stem, None)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _as_it_is(batch: object) -> object:
    return batch


@_answered
def _packed_images(written: type[Dataset]) -> str:
    with tempfile.TemporaryDirectory() as name:
        path, drawn = Path(name) / "images.npy", np.random.default_rng(0)
        images, labels = drawn.integers(0, 256, (3000, 3, 32, 32), np.uint8), torch.arange(3000)
        np.save(path, images)
        try:
            unopened = written(Path(name) / "not-there-yet.npy", labels)
        except FileNotFoundError:
            raise Wrong(
                "the file is opened when the dataset is made; each worker should open it, at its first batch."
            ) from None
        _expect(len(unopened) == 3000, f"expected a length of 3,000, found {len(unopened)}.")
        dataset, chosen = written(path, labels), [7, 2999, 0, 7]
        found = dataset.__getitems__(chosen)
        _expect(
            isinstance(found, tuple) and len(found) == 2 and all(isinstance(each, torch.Tensor) for each in found),
            f"expected the images and the labels of the batch, two tensors, found {type(found).__name__}"
            + (f" of {', '.join(type(each).__name__ for each in found[:3])}." if isinstance(found, Sequence) else "."),
        )
        shapes = tuple(map(tuple, (each.shape for each in found)))
        _expect(shapes == ((4, 3, 32, 32), (4,)), f"expected shapes (4, 3, 32, 32) and (4,), found {shapes}.")
        _expect(
            torch.equal(found[0], torch.from_numpy(images[chosen])), "the images are not those asked for, in order."
        )
        _expect(found[1].tolist() == chosen, f"expected the labels {chosen}, found {found[1].tolist()}.")
        size = len(pickle.dumps(dataset))
        _expect(
            size < 1_000_000,
            f"once a batch was read, it takes {size / 1e6:.0f} MB on its way to a spawned worker: all the images.",
        )
        loader = DataLoader(dataset, 1000, num_workers=1, collate_fn=_as_it_is, multiprocessing_context="spawn")
        _expect(
            torch.equal(torch.cat([batch for batch, _ in loader]), torch.from_numpy(images)),
            "a worker that was spawned read other images.",
        )
        once, each = _in_turns(
            lambda: dataset.__getitems__(list(range(0, 2560, 10))),
            lambda: [dataset.__getitems__([index]) for index in range(0, 2560, 10)],
        )
        _expect(once < each / 1.5, f"256 images at once take {1e3 * once:.2f} ms, one by one {1e3 * each:.2f} ms.")
        dataset.__dict__.clear()  # Windows removes no file that is mapped
    return f"also in a worker. 256 images at once take {1e3 * once:.2f} ms, one by one {1e3 * each:.2f} ms."


def _in_turns(*calls: Callable, rounds: int = 7) -> list[float]:
    """Return the least seconds that each call takes."""
    seconds = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return list(map(min, seconds))


class _Loader:
    """A loader that can be gone through again and again, as a DataLoader; each batch has its number for a label."""

    def __init__(self, count: int):
        self.batches = [
            (images, torch.full_like(labels, number)) for number, (images, labels) in enumerate(_batches(count))
        ]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


@_answered
def one_ahead(written: Callable) -> str:
    """Notebook 08: ``written(loader, start_copy, finish_copy)`` yields batches, the copy of the next one started."""
    for count in (6, 1, 0):
        started, finished = [], []

        def start_copy(batch: Sequence[torch.Tensor], started: list = started) -> tuple[str, int]:
            started.append(int(batch[1][0]))
            return "started", started[-1]

        def finish_copy(copy: tuple[str, int], finished: list = finished) -> tuple[str, int]:
            finished.append(copy[1])
            return "copied", copy[1]

        found = written(_Loader(count), start_copy, finish_copy)
        _expect(
            isinstance(found, Iterator),
            f"expected a function that yields batches, found that it returns {type(found).__name__}: all batches would "
            "be on the device at once.",
        )
        number = -1
        for number, batch in enumerate(found):
            _expect(
                batch == ("copied", number),
                f"expected batch {number} as finish_copy returns it, found {str(batch)[:60]}.",
            )
            ahead = started[number + 1 :]
            if number + 1 < count:
                _expect(ahead, f"batch {number} was yielded, and nobody had started the copy of batch {number + 1}.")
            _expect(
                len(ahead) <= 1,
                f"when batch {number} was yielded, the copies of {len(ahead)} batches after it had been "
                "started: one is enough, and all of them would fill the device's memory.",
            )
            _expect(
                len(finished) == number + 1,
                f"when batch {number} was yielded, finish_copy had been called {len(finished)} times: the device then "
                "waits for a copy that should run beside its computing.",
            )
        _expect(number + 1 == count, f"from a loader of {count} expected as many batches, found {number + 1}.")
    return "each batch comes while the next one is being copied, and none is lost."


class _Copies(TorchDispatchMode):
    """Notes the operators that copy a tensor of images."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        result, name = function(*args, **(kwargs or {})), str(function).split(".")[1]
        if name in ("clone", "copy_", "_to_copy", "contiguous") and torch.is_tensor(result) and result.dim() == 4:
            self.found.append(f"aten::{name}")
        return result


@_answered
def channel_norm(written: Callable) -> str:
    """Notebook 09: ``written(images, weight, bias)`` normalizes the channels of each pixel, and keeps channels_last."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.rand(2, 6, 4, 5, generator=drawn)
    weight, bias = (torch.rand(6, generator=drawn).requires_grad_() for _ in range(2))
    mean, variance = images.mean(1, keepdim=True), images.var(1, keepdim=True, correction=0)
    scaled = (images - mean) / (variance + 1e-5).sqrt()
    expected = scaled * weight.detach().view(1, -1, 1, 1) + bias.detach().view(1, -1, 1, 1)
    last = images.contiguous(memory_format=torch.channels_last)
    with _Copies() as copies:
        found = written(last, weight, bias)
    for title, result in (("channels_last", found), ("contiguous", written(images, weight, bias))):
        _expect(isinstance(result, torch.Tensor), f"expected a tensor, found {type(result).__name__}.")
        _expect(
            result.shape == images.shape,
            f"expected the shape {tuple(images.shape)}, whatever the memory format, found {tuple(result.shape)}.",
        )
        difference = float((result.detach() - expected).abs().max())
        _expect(
            difference < 1e-2,
            f"images in {title}: a number differs by {difference:.2g}. Expected the mean 0 and the variance 1 over the "
            "6 channels of each pixel, times the weight of the channel, plus its bias.",
        )
    _expect(
        found.is_contiguous(memory_format=torch.channels_last),
        f"channels_last came in, with the strides {last.stride()}; out came {found.stride()}.",
    )
    _expect(
        not copies.found,
        f"the result is in channels_last, but images were copied on the way: {', '.join(copies.found)}.",
    )
    found.sum().backward()
    _expect(weight.grad is not None and bias.grad is not None, "weight and bias would not learn: no gradient arrives.")
    return "the same numbers, in channels_last, and nothing was copied."


FASTER = 5  # times: one operator for the batch gained 13 to 80 times over one for each image, on one core


def _marked(count: int, side: int) -> torch.Tensor:
    """Return images of which each pixel is a number of its own: image, then row, then column."""
    return torch.arange(count * side * side).view(count, 1, side, side).repeat(1, 3, 1, 1)


def _cropped_one_by_one(low: torch.Tensor, high: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs, scale, most = [], high.shape[2] // low.shape[2], low.shape[2] - size + 1
    for small, large in zip(low, high, strict=True):
        top, left = torch.randint(most, (2,)).tolist()
        sides = (scale * top, scale * left, scale * size, scale * size)
        pairs.append((v2.functional.crop(small, top, left, size, size), v2.functional.crop(large, *sides)))
    return tuple(map(torch.stack, zip(*pairs, strict=True)))


def _cpu_seconds(call: Callable[[], object]) -> float:
    """Return the shortest CPU time of a call in this thread: to wait while others have the core does not count."""
    taken, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(5):
            start = time.thread_time()
            call()
            taken.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return min(taken)


@_answered
def crop_pairs(written: Callable) -> str:
    """Notebook 07: ``written(low, high, size)`` crops each pair of images at a random place of its own."""
    count, side, size = 2000, 8, 4
    most = side - size + 1  # places each way
    for scale in (2, 3):
        low, high = _marked(count, side), _marked(count, scale * side)
        small, large = written(low, high, size)
        for title, found, crop in (("low", small, size), ("high", large, scale * size)):
            shape, expected = tuple(getattr(found, "shape", ())), (count, 3, crop, crop)
            _expect(
                shape == expected, f"the crops of {title}: expected the shape {expected}, found {shape or found!r}."
            )
            _expect(found.dtype == low.dtype, f"the crops of {title}: {low.dtype} came in, {found.dtype} came out.")
        corners = small[:, 0, 0, 0]
        numbers, top, left = corners // side**2, corners // side % side, corners % side
        _expect(torch.equal(numbers, torch.arange(count)), "crop i is not of image i.")
        places = torch.bincount(top * side + left, minlength=side * side).view(side, side)
        _expect(int((places > 0).sum()) > 1, f"all {count:,} crops begin at the same place: draw for each image.")
        expected, counts = count / most**2, places[:most, :most]
        reach = 5 * expected**0.5  # five standard deviations of a count: by chance one right answer in 30,000 is more
        _expect(
            int(counts.sum()) == count and bool(((counts - expected).abs() < reach).all()),
            f"of {count:,} crops of {size} pixels out of {side}, expected about {expected:.0f} at each of {most} × "
            f"{most} places, from 0 to {most - 1} each way; found {int(counts.min())} to {int(counts.max())} at "
            f"these, and {count - int(counts.sum())} elsewhere.",
        )
        for title, found, images, factor in (("low", small, low, 1), ("high", large, high, scale)):
            rows, columns = (factor * first.view(-1, 1) + torch.arange(factor * size) for first in (top, left))
            pixels = images[numbers.view(-1, 1, 1), 0, rows.unsqueeze(2), columns.unsqueeze(1)]
            _expect(
                bool((found == pixels.unsqueeze(1)).all()),
                f"the crops of {title}, where high is {scale} times as large: the pixels are not those of the place "
                "where the crop of low begins, or not side by side, or not the same in all channels.",
            )
    low, high = (torch.zeros(count, 3, pixels, pixels, dtype=torch.uint8) for pixels in (8, 16))
    ratio = _cpu_seconds(lambda: _cropped_one_by_one(low, high, 4)) / _cpu_seconds(lambda: written(low, high, 4))
    _expect(
        ratio >= FASTER, f"{ratio:.1f}× as fast as image by image; expected {FASTER}× or more: no loop over images."
    )
    return f"each pair at a place of its own, all places alike, and {ratio:.0f}× as fast as image by image."


@_answered
def split(written: Callable) -> str:
    """Notebook 12: ``written(total, batch, rank, world, worker, workers, done)`` is the batches of one worker."""
    runs = 0
    for total, batch, interrupted, going_on in (
        (100, 5, (1, 1), (1, 1)), (100, 5, (1, 3), (1, 1)), (96, 4, (4, 1), (2, 1)), (96, 4, (2, 3), (3, 2)),
        (103, 5, (2, 2), (3, 1)), (7, 2, (2, 2), (4, 1)), (61, 3, (1, 2), (2, 4)),
    ):  # fmt: skip
        for stop in (0, 1, 2, 5):
            world, workers = interrupted
            title = f"{total} positions in batches of {batch}, {counted(world, 'rank')}, {counted(workers, 'worker')}"
            begun = _steps_of(written, title, total, batch, world, workers, 0)[:stop]
            done = sum(len(each) for each in begun)
            if stop:
                title = f"after {counted(len(begun), 'step')} of {title}, {done} positions done: "
                title += f"{counted(going_on[0], 'rank')}, {counted(going_on[1], 'worker')}"
                world, workers = going_on
            rest = _steps_of(written, title, total, batch, world, workers, done)
            found = [position for step in begun + rest for position in step]
            step = batch * world
            expected = list(range(done + (total - done) // step * step))
            _expect(found == expected, f"{title}: {_first_difference(found, expected)}")
            runs += 1
    return f"{runs} runs, interrupted and resumed with other numbers, have each position once, in order."


def _steps_of(written: Callable, title: str, total: int, batch: int, world: int, workers: int, done: int) -> list:
    """Return the positions of each step of all ranks, as their loaders deliver them: each worker in turn."""
    ranks = []
    for rank in range(world):
        own = [written(total, batch, rank, world, worker, workers, done) for worker in range(workers)]
        for worker, batches in enumerate(own):
            _expect(
                isinstance(batches, Sequence) and all(len(each) == batch for each in batches),
                f"{title}: expected worker {worker} of rank {rank} to have a list of batches with {batch} positions "
                f"each, found {batches!r}.",
            )
        turns = itertools.zip_longest(*own)
        ranks.append([list(each) for turn in turns for each in turn if each is not None])
    counts = [len(each) for each in ranks]
    _expect(len(set(counts)) == 1, f"{title}: expected as many batches on each rank, found {counts}: one would wait.")
    return [[position for each in step for position in each] for step in zip(*ranks, strict=True)]


def _first_difference(found: list, expected: list) -> str:
    """Say where two lists of positions part."""
    for place, (mine, right) in enumerate(itertools.zip_longest(found, expected)):
        if mine != right:
            return (
                f"in place {place} expected {'nothing more' if right is None else f'position {right}'}, "
                f"found {'nothing' if mine is None else f'position {mine}'}."
            )
    return "they are the same."


@_answered
def accumulated_step(written: Callable) -> str:
    """Notebook 10: ``written(model, optimizer, scaler, parts, largest_norm)`` is one step with a batch in parts."""
    (mine, my_optimizer), (right, optimizer) = _new_training(), _new_training()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    types = []
    mine[0].register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    for title, parts, largest_norm in (
        ("the first step", _parts(), 1e6), ("the second step", _parts(), 1e6), ("clipped to 0.1", _parts(), 0.1),
        ("with an infinite gradient", _parts(infinite=True), 0.1), ("after a skipped step", _parts(), 1e6),
    ):  # fmt: skip
        right.load_state_dict(mine.state_dict())  # each step by itself
        before, factor = copy.deepcopy(right), scaler.get_scale()
        written(mine, my_optimizer, scaler, parts, largest_norm)
        _expect(len(types) > 0, "the model was not called.")
        _expect(types[-1] == torch.bfloat16, f"expected the first layer to give bfloat16, found {types[-1]}.")
        _expect(
            all(bool(weight.isfinite().all()) for weight in mine.parameters()),
            f"{title}: weights became infinite or nan. The scaler takes the step: it looks at the gradients first.",
        )
        images, labels = map(torch.cat, zip(*parts, strict=True))
        skipped = not bool(images.isfinite().all())
        if not skipped:
            nn.functional.cross_entropy(right(images), labels).backward()
            nn.utils.clip_grad_norm_(right.parameters(), largest_norm)
            optimizer.step()
            optimizer.zero_grad()
        moved, difference = _largest_difference(right, before), _largest_difference(mine, right)
        _expect(
            difference <= moved / 10,
            f"{title}: with the whole batch a weight moves by up to {moved:.2g}; yours differ from that by "
            f"{difference:.2g}. Each image counts alike, and parts differ in size; gradients are clipped without the "
            "scaler's factor; a step begins with no gradients.",
        )
        _expect(
            not skipped or scaler.get_scale() < factor,
            "a step was skipped, and the scaler's factor is what it was: nobody calls its update().",
        )
    return "the step of the whole batch, clipped or not, and a skipped step does no harm."


def _parts(infinite: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a batch in three parts, the last one smaller, brighter and of one class."""
    (first, second, last) = _batches(3)
    parts = [first, second, (4 * last[0][:2], torch.full((2,), 3))]
    if infinite:
        parts[1] = (second[0].clone().fill_(torch.inf), second[1])
    return parts


class _Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        self.count += str(function).partition(".")[2].partition(".")[0] in ("mm", "addmm", "bmm", "baddbmm", "linear")
        return function(*args, **(kwargs or {}))


@_answered
def three_in_one(written: Callable) -> str:
    """Notebook 11: ``written(x, query, key, value)`` applies three linear layers to `x` with one product."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(16, size) for size in (16, 16, 24)]
        x = torch.rand(32, 16)
    expected = [layer(x) for layer in layers]
    with _Products() as products:
        found = written(x, *layers)
    _expect(isinstance(found, Sequence) and len(found) == 3, f"expected three tensors, found {type(found).__name__}.")
    for number, (mine, right) in enumerate(zip(found, expected, strict=True), 1):
        _expect(
            mine.shape == right.shape, f"result {number}: expected {tuple(right.shape)}, found {tuple(mine.shape)}."
        )
        difference = float((mine - right).detach().abs().max())
        _expect(difference < 1e-5, f"result {number} differs by {difference:.2g} from what the layer gives.")
    sum(each.sum() for each in found).backward()
    missing = [each for layer in layers for each in layer.parameters() if each.grad is None]
    _expect(not missing, f"{counted(len(missing), 'weight')} of the layers would not learn: no gradient arrives there.")
    _expect(products.count == 1, f"expected one product of matrices, found {products.count}.")
    return "the same results and gradients, with one product instead of three."


def overlap(file: Path) -> bool:
    """Notebook 13: a file with `Overlapped`, which averages gradients over the ranks in buckets, during backward."""
    return _check_file(file, "Overlapped", _overlap, file)


@_answered
def _overlap(written: type, file: Path) -> str:
    script = Path(__file__).with_name("distributed_checks.py")
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "answer.json"
        try:
            launching.torchrun(script, file, answer, ranks=2, timeout=LIMIT, quiet=True)
        except launching.JobFailed as error:
            raise Wrong(f"two ranks ran it, and gave no answer. {error}") from None
        found = json.loads(answer.read_text(encoding="utf-8"))
    _expect(found["right"], found["said"])
    return found["said"]
