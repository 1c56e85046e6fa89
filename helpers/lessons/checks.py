"""Checks of code that the reader writes in a notebook: each runs it, and says at once what it expected and found.

A check asks for behaviour, never for a text: whatever gives the right result is right. Each takes what was written in
the cell above it, a function, a class or a file, prints a line, and returns whether that is right. It never shows a
solution.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from helpers.wording import counted, milliseconds

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
    """Items that take a while; the first one much longer, as the first of a loader does."""

    def __init__(self, seconds: float, first: float = 0.0):
        self.seconds, self.first, self.taken = seconds, first, []

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = time.perf_counter()
        time.sleep(self.seconds if self.taken else self.seconds + self.first)
        self.taken.append(time.perf_counter() - start)
        return torch.zeros(3), torch.tensor(0)


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


def _expected_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor):
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


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
    _expect(len(dataset.taken) == 50, f"expected 50 items to be read, found {counted(len(dataset.taken), 'item')}.")
    expected = 50 / seconds
    close = abs(found - expected) <= CLOCKS_AGREE * expected
    _expect(close, f"50 items took {seconds:.2f} s, so expected {expected:.0f} items/s, found {found:.4g}.")
    return f"{found:.0f} items/s of a dataset that takes {milliseconds(4)} for each."


@_answered
def train_step(written: Callable) -> str:
    """Notebook 01: ``written(model, optimizer, images, labels)`` trains on one batch and returns its loss."""
    (mine, my_optimizer), (right, optimizer) = _new_training(), _new_training()
    for number, batch in enumerate(_batches(3), 1):
        loss, expected = written(mine, my_optimizer, *batch), _expected_step(right, optimizer, *batch)
        _expect(
            isinstance(loss, torch.Tensor),
            f"expected the loss as a tensor, found {loss!r}. Nobody needs its value in the step, and to read it makes "
            "the host wait for a GPU.",
        )
        _expect(not loss.requires_grad, "the loss that you return still holds the graph of all it was computed from.")
        _expect(
            _close(loss, expected, 1e-3), f"expected a loss of {expected:.4f} in step {number}, found {loss:.4f} nats."
        )
        difference = _largest_difference(mine, right)
        _expect(difference < 1e-4, f"after step {number} a weight differs by {difference:.2g} from what is expected.")
    return "after three steps the weights are those expected."


@_answered
def two_clocks(written: Callable) -> str:
    """Notebook 02: ``written(loader, step)`` returns the seconds of loading alone and of compute alone, for a step."""
    dataset, computed = _Slow(0.006, first=0.3), []

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        start = time.perf_counter()
        time.sleep(0.012 if computed else 0.3)  # the first step prepares, as on a GPU
        computed.append(time.perf_counter() - start)

    found = written(DataLoader(dataset, batch_size=1), step)
    _expect(
        isinstance(found, Sequence) and len(found) == 2, f"expected two numbers, loading and compute, found {found!r}."
    )
    _expect(len(dataset.taken) > 5, f"expected some batches to be loaded, found {len(dataset.taken)}.")
    _expect(len(computed) > 5, f"expected some steps to be computed, found {len(computed)}.")
    for name, seconds, taken in zip(("loading", "compute"), found, (dataset.taken, computed), strict=True):
        expected = statistics.mean(taken[1:])
        close = abs(seconds - expected) <= CLOCKS_AGREE * expected
        _expect(
            close,
            f"expected {milliseconds(expected * 1e3)} for {name} alone, found {milliseconds(seconds * 1e3)} a step. "
            "The first of each takes 300 ms longer, and the other clock's work must not be in between.",
        )
    return f"loading {milliseconds(found[0] * 1e3)}, compute {milliseconds(found[1] * 1e3)} a step."


@_answered
def new_loader(written: Callable[[Dataset], DataLoader]) -> str:
    """Notebook 03: ``written(dataset)`` returns the loader that the notebook asks for."""
    dataset = TensorDataset(torch.arange(300))
    loader = written(dataset)
    _expect(isinstance(loader, DataLoader), f"expected a DataLoader, found {type(loader).__name__}.")
    asked = {
        "num_workers": 2,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "pin_memory": torch.cuda.is_available(),
    }
    found = {name: getattr(loader, name) for name in asked}
    wrong = {name: value for name, value in found.items() if value != asked[name]}
    _expect(not wrong, "; ".join(f"{name}: found {value}" for name, value in wrong.items()) + ".")
    epochs = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    sizes = {len(batch) for batch in epochs[0]}
    _expect(sizes == {128}, f"expected batches of 128 images only, found sizes {sorted(sizes)}.")
    seen = set(itertools.chain(*epochs[0]))
    _expect(len(seen) == 256, f"expected 256 different images in an epoch, found {len(seen)}.")
    _expect(epochs[0] != epochs[1], "two epochs had the same order.")
    return "two epochs in different orders, from workers that stay."


@_answered
def normalize(written: type[nn.Module]) -> str:
    """Notebook 04: ``written(mean, std)`` is a module that normalizes a batch of bytes, and has buffers."""
    mean, std = (0.5, 0.25, 0.125), (0.5, 0.25, 0.2)
    module = written(mean, std)
    images = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, found = images.clone(), module(images)
    shape = (1, 3, 1, 1)
    expected = (images / 255 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    _expect(isinstance(found, torch.Tensor), f"expected a tensor, found {type(found).__name__}.")
    _expect(found.dtype == torch.float32, f"expected float32, found {found.dtype}.")
    _expect(found.shape == images.shape, f"expected the shape {tuple(images.shape)}, found {tuple(found.shape)}.")
    difference = float((found.detach() - expected).abs().max())
    _expect(difference < 1e-4, f"a number differs by {difference:.3g} from (pixel / 255 − mean) / std.")
    _expect(torch.equal(images, before), "the images that came in were changed.")
    _expect(not list(module.parameters()), "the mean and the standard deviation would be trained: they are parameters.")
    _expect(len(module.state_dict()) >= 2, "the mean and the standard deviation are not saved with the weights.")
    moved = {name: each.dtype for name, each in module.double().state_dict().items()}
    _expect(set(moved.values()) == {torch.float64}, "what is in the module does not move with it.")
    return "normalized as expected, saved with the weights, not trained."


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
    try:
        written = _imported(file).PackedImages
    except FileNotFoundError:
        print(f"Nothing to check yet: there is no file {file}. Run the cell above, which writes it.")
        return False
    except Exception as error:
        print(f"Not yet: no PackedImages can be imported from {file.name}: {type(error).__name__}: {error}")
        return False
    return _packed_images(written)


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


class _Watched(torch.Tensor):
    """A loss that notes whenever its value is asked for."""

    asked: list[str]

    def __format__(self, layout: str) -> str:
        self.asked.append("__format__")
        return format(self.as_subclass(torch.Tensor).item(), layout)

    @classmethod
    def __torch_function__(cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        name = getattr(function, "__name__", "")
        result = super().__torch_function__(function, types, args, kwargs or {})
        watched = next((each for each in _flat(args) if isinstance(each, cls) and hasattr(each, "asked")), None)
        if watched is not None and name in READS:
            watched.asked.append(name)
        if watched is not None and isinstance(result, cls):
            result.asked = watched.asked
        return result


# What makes the host wait for a GPU: the value is needed in Python or in the host's memory.
READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__", "to"}


def _flat(values: object) -> Iterator[object]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    else:
        yield values


@_answered
def mean_loss(written: Callable) -> str:
    """Notebook 08: ``written(loader, step)`` takes a step with each batch and returns the mean loss, a float."""
    asked, when, values = [], [], [3.0, 2.0, 4.0, 1.0, 5.0, 0.0]

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        when.append(len(asked))
        loss = torch.tensor(values[len(when) - 1]).as_subclass(_Watched)
        loss.asked = asked
        return loss

    found = written(_batches(len(values)), step)
    _expect(len(when) == len(values), f"expected {len(values)} steps, found {len(when)}.")
    _expect(isinstance(found, (int, float)), f"expected the mean as a float, found {type(found).__name__}.")
    _expect(abs(found - 2.5) < 1e-4, f"expected a mean of 2.5 nats, found {found:.4g}.")
    _expect(
        when[-1] == 0, f"a loss was read in the loop ({', '.join(sorted(set(asked)))}): there the host waits each time."
    )
    _expect(len(asked) <= 1, f"after the loop losses were read {len(asked)} times; once is enough.")
    return "six steps, and the host waited once."


@_answered
def channels_last_step(written: Callable) -> str:
    """Notebook 09: ``written(model, optimizer, images, labels)`` trains in channels_last, whatever comes in."""
    (mine, my_optimizer), (right, optimizer) = _new_training(), _new_training()
    seen = []
    mine[0].register_forward_pre_hook(lambda layer, inputs: seen.append((layer.weight, inputs[0])))
    for batch in _batches(2):
        loss, expected = written(mine, my_optimizer, *batch), _expected_step(right, optimizer, *batch)
        _expect(seen, "the model was not called.")
        for what, tensor in zip(("weights of the first layer", "images"), seen[-1], strict=True):
            _expect(
                tensor.is_contiguous(memory_format=torch.channels_last),
                f"expected the {what} in channels_last, found the strides {tensor.stride()} of {tuple(tensor.shape)}.",
            )
        _expect(isinstance(loss, torch.Tensor), f"expected the loss as a tensor, found {type(loss).__name__}.")
        _expect(
            _close(loss.detach(), expected, 1e-3), f"expected a loss of {expected:.4f}, found {float(loss):.4f} nats."
        )
    difference = _largest_difference(mine, right)
    _expect(difference < 1e-3, f"a weight differs by {difference:.2g} from what it is without channels_last.")
    return "weights and images are in channels_last, and the network learns the same."


@_answered
def mixed_step(written: Callable) -> str:
    """Notebook 10: ``written(model, optimizer, scaler, images, labels)`` trains in bfloat16, clipped to 0.1."""
    (mine, my_optimizer), (right, optimizer) = _new_training(), _new_training()
    scaler, factor = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), 1024.0
    types = []
    mine[0].register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    for batch in _batches(4):
        written(mine, my_optimizer, scaler, *batch)
        _expect(types, "the model was not called.")
        _expect(types[-1] == torch.bfloat16, f"expected the first layer to give bfloat16, found {types[-1]}.")
        loss = nn.functional.cross_entropy(right(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(right.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    difference, moved = _largest_difference(mine, right), _largest_difference(right, _network())
    _expect(
        difference < moved / 5,
        f"in four steps a weight moves by up to {moved:.2g}; yours differ from those expected by {difference:.2g}. "
        "Are the gradients cleared, and divided by the factor before they are clipped to a norm of 0.1?",
    )
    _expect(scaler.get_scale() > factor, "the scaler does not look for a better factor: nobody calls its update().")
    return "four steps in bfloat16, scaled, clipped, and the scaler goes on looking."


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
        difference = float((mine - right).abs().max())
        _expect(difference < 1e-5, f"result {number} differs by {difference:.2g} from what the layer gives.")
    sum(each.sum() for each in found).backward()
    missing = [each for layer in layers for each in layer.parameters() if each.grad is None]
    _expect(not missing, f"{counted(len(missing), 'weight')} of the layers would not learn: no gradient arrives there.")
    _expect(products.count == 1, f"expected one product of matrices, found {products.count}.")
    return "the same results and gradients, with one product instead of three."
