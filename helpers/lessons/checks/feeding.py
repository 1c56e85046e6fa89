"""Checks of notebooks 04 to 07, and 15: what is done to images, and which of them a worker reads."""

import itertools
import pickle
import tempfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from helpers.lessons.checks.answering import Wrong, answered, expect, expect_written, imported, slip
from helpers.training.called_operators import Calls
from stepscope.base.wording import counted


class _BrightAtLast:
    """Three batches of bytes, the last one smaller and brighter; it counts how many are in memory at once."""

    def __init__(self) -> None:
        self.most = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        for count, darkest in ((50, 0), (50, 20), (7, 180)):
            images = torch.randint(darkest, 256, (count, 3, 8, 6), dtype=torch.uint8, generator=drawn)
            images[:, 1] //= 2  # the channels differ
            images[:, 2] = 255 - images[:, 2] // 4
            alive.add(images)
            self.most = max(self.most, len(alive))
            yield images, torch.zeros(count, dtype=torch.int64)
            del images


@answered
def mean_and_std(written: Callable) -> str:
    """Notebook 04: ``written(loader)`` returns each channel's mean and standard deviation, of pixels from 0 to 1."""
    batches = [images.double() / 255 for images, _ in _BrightAtLast()]
    pixels = torch.cat(batches)
    expected = {"mean": pixels.mean(dim=(0, 2, 3)), "standard deviation": pixels.std(dim=(0, 2, 3), correction=0)}
    loader = _BrightAtLast()
    found = written(loader)
    two = isinstance(found, Sequence) and len(found) == 2
    expect(two, "the mean and the standard deviation", type(found).__name__)
    means = torch.stack([images.mean((0, 2, 3)) for images in batches]).mean(0)
    deviations = torch.stack([images.std((0, 2, 3)) for images in batches]).mean(0)
    total, shape = pixels.sum(dim=(0, 2, 3)), tuple(pixels.shape[1:])
    slips = {
        "Bytes go from 0 to 255, pixels from 0 to 1.": 255 * expected["mean"],
        "All pixels count the same, and the last batch has fewer.": means,
        f"Images have the shape {shape} here, not (3, 32, 32).": total / (len(pixels) * 32 * 32),
        "Count the pixels of each batch, not each time those of the first.": total / (3 * batches[0][:, 0].numel()),
        "Count the pixels of one channel, not of all three.": expected["mean"] / 3,
        "That is the deviation; the mean comes first.": expected["standard deviation"],
        "The mean of the batches' deviations is another number.": deviations,
        "That is the variance, the square of the deviation.": expected["standard deviation"] ** 2,
    }
    hint = "The square of a byte does not fit into a byte; the variance is the mean of the squares minus mean ** 2."
    found = [torch.as_tensor(mine, dtype=torch.float64, device="cpu").flatten() for mine in found]
    for mine, (case, right) in zip(found, expected.items(), strict=True):
        expect(len(mine) == 3, "a number for each of 3 channels", counted(len(mine), "number"), case)
        alike = bool((mine - right).abs().max() < 1e-3)
        expect(alike, _digits(right), _digits(mine), case, slip(mine, slips, hint * (case != "mean")))
    memory = f"{loader.most} of 3 batches in memory at once"
    expect(loader.most <= 2, "one batch in memory at a time", memory, hint="A whole dataset may not fit.")
    return f"mean {_digits(found[0])}, standard deviation {_digits(found[1])}, with one batch in memory at a time."


def _digits(numbers: torch.Tensor) -> str:
    return ", ".join(f"{float(each):.4f}" for each in numbers)


@answered
def resize(written: Callable) -> str:
    """Notebook 05: ``written(path, side)`` returns a photo whose shorter side has `side` pixels, upright, in RGB."""
    with tempfile.TemporaryDirectory() as name:
        for title, size, mode, turned in (
            ("a wide photo", (640, 400), "RGB", False), ("a tall photo", (322, 500), "RGB", False),
            ("a grey photo", (512, 512), "L", False), ("a photo stored on its side (EXIF)", (400, 640), "RGB", True),
        ):  # fmt: skip
            photo, path = _disc(size, mode), Path(name) / "photo.jpg"
            photo = photo.transpose(Image.Transpose.ROTATE_90) if turned else photo
            exif = photo.getexif()
            exif[0x0112] = 6 if turned else 1  # orientation; 6: to be turned clockwise by a quarter
            photo.save(path, quality=95, exif=exif)
            found = written(path, 100)
            case = f"{title} of {size[0]} × {size[1]}"
            expect(isinstance(found, Image.Image), "a PIL image", type(found).__name__, case)
            expect(found.mode == "RGB", "the mode RGB", found.mode, case)
            expected = tuple(round(100 * side / min(size)) for side in size)
            right = all(abs(mine - other) <= 1 for mine, other in zip(found.size, expected, strict=True))
            expect(right and min(found.size) == 100, f"{expected} pixels", found.size, case)
            pixels = np.asarray(found.convert("L"), float)
            difference = np.abs(pixels - np.asarray(_disc(found.size, "L"), float)).mean()
            moved = f"it moved, turned or stretched: pixels differ by {difference:.0f}"
            expect(difference < 8, "the content in its original place", moved, case)
    return "four photos, with their shapes kept."


def _disc(size: tuple[int, int], mode: str) -> Image.Image:
    """Return a picture of a disc above and left of the middle, as wide as half of the shorter side."""
    across, down = np.meshgrid(*(np.arange(length) - (length - 1) / 2 for length in size))
    away = np.hypot(across + min(size) / 8, down + min(size) / 5)  # not alike: each turned picture differs
    pixels = np.where(away < min(size) / 4, 220, 30).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


@answered
def packed_images(file: Path) -> str:
    """Notebook 06: a file with `PackedImages`, a dataset that reads whole batches from an array in a file."""
    written = expect_written(imported(file).PackedImages)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        path, labels = Path(name) / "images.npy", torch.arange(3000)
        images = np.random.default_rng(0).integers(0, 256, (3000, 3, 32, 32), np.uint8)
        np.save(path, images)
        try:
            length = len(written(Path(name) / "not-there-yet.npy", labels))
        except FileNotFoundError:
            raise Wrong(
                "the dataset opens the file when it is created; each worker should open it, at its first batch."
            ) from None
        expect(length == 3000, "a length of 3,000", length)
        dataset, chosen = written(path, labels), [7, 2999, 0, 7]
        with Calls() as operators:
            found = dataset.__getitems__(chosen)
        types = [type(part).__name__ for part in found]
        tensors = isinstance(found, tuple) and types == ["Tensor", "Tensor"]
        expected = "the images and the labels of the batch, two tensors"
        expect(tensors, expected, f"{type(found).__name__} of {', '.join(types[:3])}")
        shapes = tuple(tuple(part.shape) for part in found)
        expect(shapes == ((4, 3, 32, 32), (4,)), "shapes (4, 3, 32, 32) and (4,)", shapes)
        expect(found[0].dtype == torch.uint8, "bytes (torch.uint8), as they are in the file", found[0].dtype)
        expect(torch.equal(found[0], torch.from_numpy(images[chosen])), f"images {chosen}, in this order", "others")
        expect(found[1].tolist() == chosen, f"the labels {chosen}", found[1].tolist())
        np.save(Path(name) / "other.npy", images[::-1])
        other = written(Path(name) / "other.npy", labels)
        tracemalloc.start()
        tracemalloc.clear_traces()  # it may have been started before
        try:
            found, _ = other.__getitems__(chosen)
            copied = [each.nbytes for operator, each in operators.calls if operator in ("_to_copy", "clone")]
            most = max(tracemalloc.get_traced_memory()[1], *copied, 0) / 1e6  # NumPy's memory, and PyTorch's
        finally:
            tracemalloc.stop()
        hint = f"The file has {images.nbytes / 1e6:.1f} MB: read only what the batch needs."
        expect(most < 2, "less than 2 MB of memory for a batch of 12 kB", f"{most:.1f} MB", hint=hint)
        right = torch.equal(found, torch.from_numpy(images[::-1][chosen]))
        expect(right, "the images of its own file", "others", "a second dataset, of another file")
        size = f"{len(pickle.dumps(dataset)) / 1e6:.2f}"
        expect(float(size) < 1, "less than 1 MB to send to a spawned worker after a batch was read", f"{size} MB")
        loader = DataLoader(dataset, 1000, num_workers=1, collate_fn=_as_it_is, multiprocessing_context="spawn")
        read = torch.cat([batch for batch, _ in loader])
        expect(torch.equal(read, torch.from_numpy(images)), "the images of the file", "others", "a spawned worker")
        for each in (dataset, other):
            each.__dict__.clear()  # Windows cannot delete a mapped file
    return "the images and labels that were asked for, a batch at once, also in a spawned worker."


def _as_it_is(batch: object) -> object:
    return batch


OPERATORS = 200  # at most, for 2,000 pairs: about 10 if all are cropped at once, 4,000 and more image by image


@answered
def crop_pairs(written: Callable) -> str:
    """Notebook 07: ``written(low, high, size)`` crops each pair of images at a random place of its own."""
    count, side, size, before = 2000, 8, 4, None
    most = side - size + 1  # places along each side
    for scale in (2, 3):
        # Each pixel has its own number: by image, then row, then column
        low, high = (
            torch.arange(count * pixels**2).view(count, 1, pixels, pixels).repeat(1, 3, 1, 1)
            for pixels in (side, scale * side)
        )
        with Calls() as operators:
            found = written(low, high, size)
        two = isinstance(found, Sequence) and len(found) == 2
        expect(two, "two tensors, the crops of low and those of high", type(found).__name__)
        small, large = found
        for name, found, crop in (("low", small, size), ("high", large, scale * size)):
            case, expected = f"the crops of {name}", (count, 3, crop, crop)
            shape = tuple(getattr(found, "shape", ()))
            expect(shape == expected, f"the shape {expected}", shape or repr(found), case)
            expect(found.dtype == low.dtype, f"{low.dtype}, as it came in", found.dtype, case)
        corners = small[:, 0, 0, 0]
        numbers, top, left = corners // side**2, corners // side % side, corners % side
        expect(torch.equal(numbers, torch.arange(count)), "crop i of image i", "crops of other images")
        places = torch.bincount(top * side + left, minlength=side * side).view(side, side)
        usual, counts = count / most**2, places[:most, :most]
        alike = bool(((counts - usual).abs() < 5 * usual**0.5).all())  # by chance, 1 run in 30,000 exceeds it
        elsewhere, hint = count - int(counts.sum()), "Draw one place for each image."
        if torch.equal(top, left) and counts.diagonal().all():
            hint = "Draw one number for the row of each image, and one for its column."
        elif counts[:-1, :-1].all() and not counts[-1].any():
            hint = "A crop can begin in row 0 to H - size, these included."
        expect(
            alike and not elsewhere,
            f"about {usual:.0f} of {count:,} crops at each of {most} × {most} places, from 0 to {most - 1} each way",
            f"{int(counts.min())} to {int(counts.max())} at these, and {elsewhere} elsewhere",
            hint=hint,
        )
        expect(before is None or not torch.equal(corners, before), "other places in each call", "the same ones")
        before = corners
        for name, found, images, factor in (("low", small, low, 1), ("high", large, high, scale)):
            rows, columns = (factor * first.view(-1, 1) + torch.arange(factor * size) for first in (top, left))
            pixels = images[numbers.view(-1, 1, 1), 0, rows.unsqueeze(2), columns.unsqueeze(1)]
            expect(
                bool((found == pixels.unsqueeze(1)).all()),
                "adjacent pixels from the place where the crop of low begins, in all channels",
                "others",
                f"the crops of {name}, where high is {scale} times as large",
                "In high, row and column of the place are scale times those in low." * (name == "high"),
            )
    calls = f"{counted(len(operators.calls), 'operator')} for {count:,} pairs"
    expect(len(operators.calls) <= OPERATORS, f"at most {OPERATORS}", calls, "one batch", "No loop over images.")
    return f"each pair has its own place, all places are equally frequent, with {calls}."


@answered
def split(written: Callable) -> str:
    """Notebook 15: ``written(total, batch, rank, world, worker, workers, done)`` returns one worker's batches."""
    runs = 0
    for total, batch, interrupted, resumed in (
        (100, 5, (1, 1), (1, 1)), (100, 5, (1, 3), (1, 1)), (96, 4, (4, 1), (2, 1)), (96, 4, (2, 3), (3, 2)),
        (103, 5, (2, 2), (3, 1)), (7, 2, (2, 2), (4, 1)), (61, 3, (1, 2), (2, 4)),
    ):  # fmt: skip
        for stop in (0, 1, 2, 5):
            begun = _steps_of(written, total, batch, *interrupted, 0)[:stop]
            done, (world, workers) = sum(map(len, begun)), resumed if stop else interrupted
            positions = list(itertools.chain(*begun, *_steps_of(written, total, batch, world, workers, done)))
            expected = range(done + (total - done) // (batch * world) * batch * world)
            case = _case(total, batch, world, workers, done)
            pairs = itertools.zip_longest(positions, expected, fillvalue="nothing more")
            for place, (found, right) in enumerate(pairs):
                before = "That one came before." * (found in positions[:place])
                hint = "That one is done already." * (found in range(done)) or before
                expect(found == right, f"{right} in place {place} of all positions", found, case, hint)
            runs += 1
    return f"{runs} runs, interrupted and resumed with other numbers, read each position once, in order."


def _case(total: int, batch: int, world: int, workers: int, done: int) -> str:
    ranks = f"{counted(world, 'rank')}, {counted(workers, 'worker')} each"
    return f"{total} positions in batches of {batch}, {f'resumed at {done}' if done else 'begun'} with {ranks}"


def _steps_of(written: Callable, total: int, batch: int, world: int, workers: int, done: int) -> list[list[int]]:
    """Return the positions of each step of all ranks, as their loaders deliver them: each worker in turn."""
    ranks, case = [], _case(total, batch, world, workers, done)
    for rank in range(world):
        own = [written(total, batch, rank, world, worker, workers, done) for worker in range(workers)]
        for worker, batches in enumerate(own):
            right = isinstance(batches, Sequence) and all(np.ndim(each) and len(each) == batch for each in batches)
            expect(right, f"a list of batches with {batch} positions each for worker {worker} of rank {rank}",
                   repr(batches), case)  # fmt: skip
        ranks.append([list(each) for turn in itertools.zip_longest(*own) for each in turn if each is not None])
    counts = [len(batches) for batches in ranks]
    expect(len(set(counts)) == 1, "equally many batches on each rank", counts, case, "One rank would wait.")
    return [list(itertools.chain(*batches)) for batches in zip(*ranks, strict=True)]
