"""Gets CIFAR-10 from an archive, from the internet or drawn, and keeps it as one PNG an image beside ``labels.csv``."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import socket
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import config
from helpers.data import manifests, synthetic
from stepscope.base import staging

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the classes 0 to 9."""

# Over all pixels of the 50,000 training images, computed from the official archive. The often quoted STD of
# (0.2023, 0.1994, 0.2010) is something else: the mean of the standard deviations within each image.
MEAN = (0.4914, 0.4822, 0.4465)
"""Mean of red, green and blue, between 0 and 1."""
STD = (0.2470, 0.2435, 0.2616)
"""Standard deviation of red, green and blue, between 0 and 1."""

_FORMAT = 1  # of the prepared folder: count up when its layout or the drawn images change
_OFFICIAL_ARCHIVE = "cifar-10-python.tar.gz"
_OFFICIAL_FOLDER = "cifar-10-batches-py"
_OFFICIAL_COUNTS = (50_000, 10_000)
_PARTS = ("train", "test")
_PIXELS = 32 * 32 * 3
_BATCH = re.compile(r"(?:\./)?(?:(?!\.\./)[^/]+/)?(data_batch_[1-5]|test_batch)")
_MAX_BATCH_BYTES = 64 * 2**20  # archives are not trusted; the official one has 30 MiB, or 45 as Python 3 may write it
_BYTES_PER_IMAGE = 4096  # a file of 2.26 kB takes one block
_CONNECT_SECONDS = 10.0  # how long an offline classroom waits for the download


@dataclass(frozen=True)
class Prepared:
    """Images ready to train on.

    Attributes
    ----------
    train, test : Path
        Folders of ``00000.png``, ``00001.png``, … and ``labels.csv`` with the columns ``file`` and ``label``.
    source : str
        What the images are: "CIFAR-10", "CIFAR-10 subset (5,080 + 1,016 images)" or "drawn images (5,000 + 1,000)".
        Every figure and every result says so.
    classes : tuple of str
        Names of the classes 0 to 9.
    train_images, test_images : int
        Number of images.
    """

    train: Path
    test: Path
    source: str
    classes: tuple[str, ...]
    train_images: int
    test_images: int


def prepare(
    *,
    data_dir: Path | None = None,
    archive: Path | None = None,
    drawn: tuple[int, int] | None = None,
    download: bool = True,
) -> Prepared:
    """Get the images, once: later calls only check them. Prints one line that says where they come from.

    The first of these that exists is used: real images prepared before; the archive or folder that `archive` names, or
    else one with its official name in `data_dir`; images drawn before; a download; images drawn now. The folder of
    images appears whole or not at all. Many processes may call this at once: one does the work, the others wait.

    Parameters
    ----------
    data_dir : Path, optional
        Where to keep the images, by default `config.data_dir`. May be read-only when they are there.
    archive : Path, optional
        A tar file or folder in CIFAR-10's layout for Python, or a part of it; by default `config.cifar10_archive`.
    drawn : tuple of int, optional
        Training and test images to draw if there are no real ones, by default those of `config.preset`.
    download : bool
        Try to download.

    Raises
    ------
    config.CourseError
        If the archive is damaged, or is not what it should be.
    staging.DamagedFolder
        If prepared images are missing, were altered or added.
    staging.NotEnoughDisk
        If the disk has no room.
    """
    data_dir = config.data_dir() if data_dir is None else Path(data_dir)
    archive = archive or config.cifar10_archive() or _official_archive(data_dir)
    drawn = config.preset().drawn_images if drawn is None else drawn
    real, stand_in = data_dir / "cifar10", data_dir / f"cifar10-drawn-{drawn[0]}"

    def prepared_before() -> Path | None:
        return next((folder for folder in ([real] if archive else [real, stand_in]) if folder.exists()), None)

    folder = prepared_before()
    if folder is None:
        data_dir.mkdir(parents=True, exist_ok=True)
        with staging.only_one_process(data_dir):
            folder = prepared_before()
            if folder is None:
                archive = archive or (_download(data_dir) if download else None)
                folder = real if archive else stand_in
                _export(_read_archive(Path(archive)) if archive else _draw(drawn), folder)
    manifest = _check(folder)
    if manifest["made_from"] is None:
        hint = f"For the real ones, set CIFAR10_ARCHIVE or put {_OFFICIAL_ARCHIVE} into {data_dir}, and"
    else:
        hint = f"Made from {manifest['made_from']['name']}; to use another archive, delete this folder and"
    print(f"Images: {manifest['source']}, in {folder}. {hint} run `python -m helpers prepare`.", flush=True)
    return Prepared(
        train=folder / "train",
        test=folder / "test",
        source=manifest["source"],
        classes=tuple(manifest["classes"]),
        train_images=len(manifest["train"]["bytes"]),
        test_images=len(manifest["test"]["bytes"]),
    )


def verify(folder: Path) -> None:
    """Read every byte of a prepared folder and compare it with what was written.

    `prepare` checks the labels, and only names and sizes of the images.

    Parameters
    ----------
    folder : Path
        Holds ``train``, ``test`` and ``manifest.json``.

    Raises
    ------
    staging.DamagedFolder
        With the name of the first file that is not as it was made.
    """
    manifest = _check(Path(folder))
    expected = {
        Path(folder, part, _file_name(number)): checksum
        for part in _PARTS
        for number, checksum in enumerate(manifest[part]["crc32"])
    }
    read = manifests.in_threads(
        lambda path: (path, zlib.crc32(path.read_bytes())), expected, len(expected), "verifying", "image"
    )
    for path, checksum in read:
        if checksum != expected[path]:
            raise manifests.damaged(folder, path, "its content is not what was written")


@dataclass(frozen=True)
class _Images:
    """`parts` has for "train" and "test" images, uint8 of shape (images, 32, 32, 3), and labels, int64."""

    source: str
    classes: tuple[str, ...]
    parts: dict[str, tuple[np.ndarray, np.ndarray]]
    made_from: dict[str, str] | None = None


def _draw(counts: tuple[int, int]) -> _Images:
    drawn = {part: synthetic.draw(counts[number], config.SEED + number) for number, part in enumerate(_PARTS)}
    return _Images(f"drawn images ({counts[0]:,} + {counts[1]:,})", synthetic.CLASSES, drawn)


def _official_archive(data_dir: Path) -> Path | None:
    paths = (data_dir / _OFFICIAL_ARCHIVE, data_dir / _OFFICIAL_FOLDER)
    return next((path for path in paths if path.exists()), None)


def _download(data_dir: Path) -> Path | None:
    """Return the official archive, or None where it cannot be had, and print why."""
    from torchvision import datasets  # here, since it imports torch, which takes seconds and is hardly ever needed

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


def _read_archive(path: Path) -> _Images:
    batches = {}
    for name, content in _members(path):
        if name in batches:
            raise config.CourseError(f"{path}: expected {name} once, found it twice.")
        batches[name] = _read_batch(content, path, name)
    training = sorted(batches.keys() - {"test_batch"})
    if not training or "test_batch" not in batches:
        raise config.CourseError(
            f"{path}: expected data_batch_1 to data_batch_5 (or some of them) and test_batch, as in "
            f"{_OFFICIAL_ARCHIVE}, found {', '.join(sorted(batches)) or 'none of them'}."
        )
    parts = {}
    for part, names in (("train", training), ("test", ["test_batch"])):
        pixels = np.concatenate([batches[name][0] for name in names])
        labels = np.concatenate([batches[name][1] for name in names])
        parts[part] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
    counts = tuple(len(labels) for _, labels in parts.values())
    subset = f"CIFAR-10 subset ({counts[0]:,} + {counts[1]:,} images)"
    return _Images("CIFAR-10" if counts == _OFFICIAL_COUNTS else subset, CLASSES, parts, {"name": path.name})


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each batch."""
    if not path.exists():
        raise config.CourseError(f"{path}: no such file or folder; is CIFAR10_ARCHIVE right?")
    try:
        yield from _members_of_folder(path) if path.is_dir() else _members_of_tar(path)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise config.CourseError(
            f"{path}: expected a tar file like {_OFFICIAL_ARCHIVE}, but reading it failed: "
            f"{str(error).splitlines()[0]}. Is it complete, and no web page saved under this name? Get it again."
        ) from error


def _members_of_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    inner = path / _OFFICIAL_FOLDER
    for file in (inner if inner.is_dir() else path).iterdir():
        if _BATCH.fullmatch(file.name):
            yield file.name, file.read_bytes()


def _members_of_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        for member in tar:
            if match := _BATCH.fullmatch(member.name):
                if not member.isreg() or member.size > _MAX_BATCH_BYTES:
                    raise config.CourseError(
                        f"{path}: expected {member.name} to be a file of {_MAX_BATCH_BYTES >> 20} MiB at most, found "
                        f"{member.size >> 20} MiB, or a link."
                    )
                yield match[1], tar.extractfile(member).read()
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


def _read_batch(content: bytes, path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels, uint8 of shape (images, 3072), and labels, int64."""
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = (batch[key] if key in batch else batch[key.encode()] for key in ("data", "labels"))
    except Exception as error:  # a damaged pickle may raise anything, as pickle's documentation says
        raise config.CourseError(f"{path}: {name} is no batch of CIFAR-10: {error!r}.") from error
    right_pixels = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (_PIXELS,)
    right_labels = isinstance(labels, list) and all(type(label) is int and 0 <= label <= 9 for label in labels)
    if not right_pixels or not right_labels or not len(labels) == len(pixels) > 0:
        raise config.CourseError(
            f"{path}: expected in {name} data, uint8 of shape (images, {_PIXELS}), and a list of as many labels from 0 "
            f"to 9, found data of shape {np.shape(pixels)} and labels of shape {np.shape(labels)}."
        )
    return pixels, np.array(labels, np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# The folder of PNG files


def _export(images: _Images, folder: Path) -> None:
    total = sum(len(labels) for _, labels in images.parts.values())
    staging.check_free(folder.parent, total, _BYTES_PER_IMAGE)
    manifest = {
        "format": _FORMAT,
        "source": images.source,
        "classes": images.classes,
        "made_from": images.made_from,
    }
    # Only labels and manifest are forced to the disk: if a power cut takes images, the manifest shows that
    with staging.folder(folder) as new:
        for part, (pixels, labels) in images.parts.items():
            manifest[part] = _write_part(pixels, labels, new / part)
        staging.write(new / manifests.NAME, json.dumps(manifest), durable=True)


def _write_part(pixels: np.ndarray, labels: np.ndarray, folder: Path) -> dict:
    folder.mkdir()

    def write(number: int) -> tuple[int, int]:
        buffer = io.BytesIO()
        Image.fromarray(pixels[number]).save(buffer, "PNG")
        data = buffer.getvalue()
        (folder / _file_name(number)).write_bytes(data)
        return len(data), zlib.crc32(data)

    numbers = range(len(labels))
    written = list(manifests.in_threads(write, numbers, len(labels), f"writing {folder.name}", "image"))
    rows = [f"{_file_name(number)},{label}\n" for number, label in enumerate(labels)]
    table = "".join(["file,label\n", *rows])
    staging.write(folder / "labels.csv", table, durable=True)
    sizes, checksums = zip(*written, strict=True)
    return {"labels_sha256": hashlib.sha256(table.encode()).hexdigest(), "bytes": sizes, "crc32": checksums}


def _check(folder: Path) -> dict:
    """Compare names and sizes of all images, and the labels, with the manifest, and return that."""
    manifest = manifests.read(folder, _FORMAT)
    sizes = {
        f"{part}/{_file_name(number)}": size for part in _PARTS for number, size in enumerate(manifest[part]["bytes"])
    }
    manifests.check_sizes(folder, sizes, ".png")
    for part in _PARTS:
        table = folder / part / "labels.csv"
        content = table.read_bytes() if table.exists() else b""
        if hashlib.sha256(content).hexdigest() != manifest[part]["labels_sha256"]:
            raise manifests.damaged(folder, table, "its content is not what was written, or it is missing")
    return manifest


def _file_name(number: int) -> str:
    return f"{number:05d}.png"
