"""Gets CIFAR-10 from an archive, from the internet or drawn, and keeps it as PNG files beside ``labels.csv``."""

import io
import pickle
import socket
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from helpers import config
from helpers.data import manifests, sharing, synthetic
from stepscope.base import staging

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the classes 0 to 9."""

# Over all pixels of the 50,000 training images, computed from the official archive. The often quoted STD of
# (0.2023, 0.1994, 0.2010) is something else: the mean of the standard deviations within each image.
MEAN = (0.4914, 0.4822, 0.4465)
"""Mean of red, green and blue, between 0 and 1."""
STD = (0.2470, 0.2435, 0.2616)
"""Standard deviation of red, green and blue, between 0 and 1."""

_OFFICIAL_ARCHIVE, _OFFICIAL_FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
_OFFICIAL_COUNTS = (50_000, 10_000)
_TRAINING, _TEST = [f"data_batch_{number}" for number in range(1, 6)], "test_batch"
_PIXELS = 32 * 32 * 3
_MAX_BATCH_BYTES = 64 * 2**20  # archives are not trusted; the official one has 30 MiB, or 45 as Python 3 may write it
_FILE_BYTES = 4096  # an image of 2.26 kB takes one block
_PART = 250  # images that one process draws or encodes at a time
_CONNECT_SECONDS = 10.0  # how long an offline classroom waits for the download


@dataclass(frozen=True)
class Prepared:
    """Images ready to train on."""

    #: Folders of ``00000.png``, ``00001.png``, … and ``labels.csv`` with the columns ``file`` and ``label``.
    train: Path
    test: Path
    #: What the images are: "CIFAR-10", "CIFAR-10 subset (5,080 + 1,016 images)" or "drawn images (5,000 + 1,000)".
    #: Every figure and every result says so.
    source: str
    classes: tuple[str, ...]  #: Names of the classes 0 to 9
    train_images: int  #: Number of images
    test_images: int


def prepare(*, drawn: tuple[int, int] | None = None, download: bool = True) -> Prepared:
    """Get the images, once: later calls only check them. Prints one line that says where they come from.

    They lie in `config.data_dir`, which may be read-only when they are there. The first of these that exists is used:
    real images prepared before; the archive that `config.cifar10_archive` names, a tar file or folder in CIFAR-10's
    layout for Python, or a part of it; one with its official name in `config.data_dir`; images drawn before; a
    download; images drawn now. The folder of images appears whole or not at all. Many processes may call this at once:
    one does the work, the others wait. Raises `config.CourseError` if the archive is damaged or of another kind;
    `staging.DamagedFolder` if prepared images are missing, were altered or added; `staging.NotEnoughDisk` if the disk
    has no room. `drawn` are the training and test images to draw if there are no real ones, by default those of
    `config.preset`; without `download` it does not try to download.
    """
    data_dir, archive = config.data_dir(), _archive()
    counts = config.preset().drawn_images if drawn is None else drawn
    real, stand_in = _folders(counts)

    def make() -> Path:
        if found := archive or (_download(data_dir) if download else None):
            _from_archive(found, real)
            return real
        _draw(counts, stand_in)
        return stand_in

    folder = sharing.once(data_dir, lambda: folder_of(counts), make)
    source, made_from, classes, train_images, test_images = manifests.check(folder, facts=_facts)
    if made_from is None:
        hint = f"For the real ones, set CIFAR10_ARCHIVE or put {_OFFICIAL_ARCHIVE} into {data_dir}, and"
    else:
        hint = f"Made from {made_from}; to use another archive, delete this folder and"
    print(f"Images: {source}, in {folder}. {hint} run `python -m helpers prepare`.", flush=True)
    return Prepared(folder / "train", folder / "test", source, classes, train_images, test_images)


def folder_of(drawn: tuple[int, int] | None = None) -> Path | None:
    """Return the folder of images that `prepare` would only check, or None if it would make one."""
    real, stand_in = _folders(config.preset().drawn_images if drawn is None else drawn)
    return next((folder for folder in ([real] if _archive() else [real, stand_in]) if folder.exists()), None)


def _folders(drawn: tuple[int, int]) -> tuple[Path, Path]:
    """Return the folders of real images, and of drawn ones."""
    return config.data_dir() / "cifar10", config.data_dir() / f"cifar10-drawn-{drawn[0]}"


def _archive() -> Path | None:
    official = (config.data_dir() / name for name in (_OFFICIAL_ARCHIVE, _OFFICIAL_FOLDER))
    return config.cifar10_archive() or next((path for path in official if path.exists()), None)


def _facts(manifest: dict) -> tuple[str, str | None, tuple[str, ...], int, int]:
    """Return what a manifest says of the images: their source, the archive, the classes, the two numbers."""
    source, made_from, classes = manifest["source"], manifest["made_from"], tuple(manifest["classes"])
    train, test = manifest["images"]
    texts = (source, made_from or "", *classes)
    if not (all(isinstance(text, str) for text in texts) and type(train) is type(test) is int):
        raise TypeError("impossible source, classes or numbers of images")
    return source, made_from, classes, train, test


def _draw(counts: tuple[int, int], folder: Path) -> None:
    labels, files = {}, []
    for part, count, seed in zip(("train", "test"), counts, (config.SEED, config.SEED + 1), strict=True):
        labels[part] = synthetic.labels(count, seed)
        files += [partial(_drawn, part, numbers, seed) for numbers in _parts_of(count)]
    _write(files, labels, folder, f"drawn images ({counts[0]:,} + {counts[1]:,})", synthetic.CLASSES)


def _write(
    files: list[partial],
    labels: dict[str, np.ndarray],
    folder: Path,
    source: str,
    classes: Sequence[str],
    made_from: str | None = None,
) -> None:
    """Write the files that the calls yield, and a table of labels for "train" and for "test"."""
    counts = [len(numbers) for numbers in labels.values()]
    staging.check_free(folder.parent, sum(counts), _FILE_BYTES)
    files = files + [partial(_table, part, numbers) for part, numbers in labels.items()]
    facts = {"source": source, "classes": classes, "images": counts, "made_from": made_from}
    manifests.write(folder, labels, files, sum(counts) + len(labels), **facts)


def _parts_of(count: int) -> Iterator[range]:
    return (range(start, min(start + _PART, count)) for start in range(0, count, _PART))


def _drawn(part: str, numbers: range, seed: int) -> manifests.Files:
    return _encoded(part, numbers, synthetic.draw(numbers, seed)[0])


def _encoded(part: str, numbers: range, images: np.ndarray) -> manifests.Files:
    for number, image in zip(numbers, images, strict=True):
        png = io.BytesIO()
        Image.fromarray(image).save(png, "PNG")
        yield f"{part}/{number:05d}.png", png.getvalue()


def _table(part: str, labels: np.ndarray) -> manifests.Files:
    rows = [f"{number:05d}.png,{label}\n" for number, label in enumerate(labels)]
    yield f"{part}/labels.csv", "".join(["file,label\n", *rows]).encode()


def _download(data_dir: Path) -> Path | None:
    """Return the official archive, or None if it is not available, and print why."""
    from torchvision import datasets  # here, since it imports torch, which takes seconds and is rarely needed

    official = datasets.CIFAR10
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_CONNECT_SECONDS)  # torchvision has no argument for it
    try:
        with staging.scratch(data_dir / official.filename) as folder:
            datasets.utils.download_url(official.url, folder, official.filename, official.tgz_md5)
            return (folder / official.filename).replace(data_dir / _OFFICIAL_ARCHIVE)
    except staging.NotEnoughDisk:
        raise
    except (OSError, RuntimeError, HTTPException) as error:  # RuntimeError: the checksum
        print(f"CIFAR-10 could not be downloaded ({error}).", flush=True)
        return None
    finally:
        socket.setdefaulttimeout(timeout_before)


# ---------------------------------------------------------------------------------------------------------------------
# Archives: read in memory, so that no path in them can lead anywhere


def _from_archive(path: Path, folder: Path) -> None:
    batches = {}
    try:
        for name, content in _batches_of(path):
            batches[name] = _read_batch(content, f"{path}: {name}")
    except FileNotFoundError as error:
        raise config.CourseError(f"{path}: no such file or folder; is CIFAR10_ARCHIVE right?") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise config.CourseError(
            f"{path}: expected a tar file like {_OFFICIAL_ARCHIVE}, but reading it failed: "
            f"{str(error).splitlines()[0]}. Is it complete, and no web page saved under this name? Get it again."
        ) from error
    training = [batches[name] for name in _TRAINING if name in batches]
    if not training or _TEST not in batches:
        raise config.CourseError(
            f"{path}: expected data_batch_1 to data_batch_5 (or some of them) and {_TEST}, as in {_OFFICIAL_ARCHIVE}, "
            f"found {', '.join(sorted(batches)) or 'none of them'}."
        )
    parts = {"train": tuple(map(np.concatenate, zip(*training, strict=True))), "test": batches[_TEST]}
    counts = tuple(len(labels) for _, labels in parts.values())
    source = "CIFAR-10" if counts == _OFFICIAL_COUNTS else f"CIFAR-10 subset ({counts[0]:,} + {counts[1]:,} images)"
    files = [
        partial(_encoded, part, numbers, images[numbers.start : numbers.stop])
        for part, (images, labels) in parts.items()
        for numbers in _parts_of(len(labels))
    ]
    _write(files, {part: labels for part, (_, labels) in parts.items()}, folder, source, CLASSES, made_from=path.name)


def _batches_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each batch in a tar file or folder."""
    if path.is_dir():
        inner = path / _OFFICIAL_FOLDER
        for file in (inner if inner.is_dir() else path).iterdir():
            if file.name in (*_TRAINING, _TEST):
                yield file.name, file.read_bytes()
        return
    with tarfile.open(path) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name in (*_TRAINING, _TEST):
                batch = tar.extractfile(member) if member.isreg() else None
                if batch is None or member.size > _MAX_BATCH_BYTES:
                    raise config.CourseError(
                        f"{path}: expected {member.name} to be a file of {_MAX_BATCH_BYTES >> 20} MiB at most, found "
                        f"{member.size >> 20} MiB, or a link."
                    )
                yield name, batch.read()
        while tar.fileobj.read(2**20):
            pass  # to the very end, where gzip keeps its checksum


class _BatchUnpickler(pickle.Unpickler):
    """Builds arrays of bytes, text and plain containers, and nothing else."""

    def find_class(self, module: str, name: str):
        allowed = {
            ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct, which here needs none
            ("numpy", "dtype"): _byte_dtype,
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,  # NumPy 1
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,  # NumPy 2
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # how Python 3 writes bytes for Python 2
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}, which images do not need")
        return allowed[module, name]


def _empty_array(*_) -> np.ndarray:
    return np.empty(0, np.uint8)  # pickle fills it in; whatever shape the archive asks for here is not used


def _byte_dtype(name: str | bytes, *_) -> np.dtype:
    if name not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"it wants an array of {name!r}, expected uint8")
    return np.dtype(np.uint8)


def _read_batch(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 of shape (images, 32, 32, 3), and labels, int64."""
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = (batch[key] if key in batch else batch[key.encode()] for key in ("data", "labels"))
        right_pixels = pixels.dtype == np.uint8 and pixels.shape == (len(labels), _PIXELS)
        if not right_pixels or not labels or not set(labels) <= set(range(10)):
            raise ValueError(
                f"expected data, uint8 of shape (images, {_PIXELS}), and as many labels from 0 to 9, found shape "
                f"{pixels.shape} and {len(labels)} labels"
            )
        return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, np.int64)
    except Exception as error:  # a damaged pickle may raise anything, as pickle's documentation says
        raise config.CourseError(f"{where} is no batch of CIFAR-10: {error!r}.") from error
