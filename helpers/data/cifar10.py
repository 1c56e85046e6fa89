"""Gets CIFAR-10 from an archive, from the internet or drawn, and keeps it as one PNG an image beside ``labels.csv``."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import socket
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from helpers import config, staging
from helpers.data import synthetic

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

# Bounds for archives, which are not trusted. The official one has members of 30 MiB, together 178 MiB; where Python 3
# wrote the same for Python 2, they have 45 and 268 MiB.
_MAX_MEMBER_BYTES = 64 * 2**20
_MAX_TOTAL_BYTES = 384 * 2**20
_MEMBER = re.compile(r"(?:\./)?(?:(?!\.\./)[^/]+/)?(data_batch_[1-9]\d*|test_batch|batches\.meta)")

_BYTES_PER_IMAGE = 4096  # a file of 2.26 kB takes one block
_CHUNK = 250  # images a thread encodes and writes at a time
_MAX_THREADS = 8  # Pillow and NumPy release the GIL for a part of the work only
_CONNECT_SECONDS = 10.0  # how long an offline classroom waits for the download


class UnusableArchive(ValueError):
    """An archive or folder does not hold CIFAR-10 as it should, or more than that."""


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
    progress: bool = True,
) -> Prepared:
    """Get the images, once: later calls only check them. Prints one line that says where they come from.

    The first of these that exists is used: images prepared before; the archive or folder that `archive` names, or
    else one lying in `data_dir`; images drawn before; a download; images drawn now. The folder of images appears
    whole or not at all. Many processes may call this at once: one does the work, the others wait.

    Memory of the process: up to 400 MB to read the official archive, 200 MB to draw (measured with two cores).

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
    progress : bool
        Show progress bars.

    Raises
    ------
    UnusableArchive
        If the archive is damaged, or is not what it should be.
    staging.DamagedFolder
        If prepared images are missing, were altered or added.
    staging.NotEnoughDisk
        If the disk has no room.
    """
    data_dir = config.data_dir() if data_dir is None else Path(data_dir)
    archive = config.cifar10_archive() if archive is None else Path(archive)
    drawn = config.preset().drawn_images if drawn is None else drawn
    found = _find_prepared(data_dir, archive, drawn)
    if found is None:
        data_dir.mkdir(parents=True, exist_ok=True)
        with staging.only_one_process(data_dir):
            found = _find_prepared(data_dir, archive, drawn)
            if found is None:
                return _make(data_dir, archive, drawn, download, progress)
    prepared, made_from = found
    folder = prepared.train.parent
    print(f"Images: {prepared.source}, found in {folder}.{_how_to_get_real_ones(data_dir, prepared)}", flush=True)
    if archive and folder.name == "cifar10" and made_from != _fingerprint(archive):
        print(
            f"They were made from {made_from['name']}, not from {archive}: to use that one, delete {folder} and run "
            "`python -m helpers prepare`.",
            flush=True,
        )
    return prepared


def verify(folder: Path, progress: bool = True) -> None:
    """Read every byte of a prepared folder and compare it with what was written.

    `prepare` checks the labels, and names and sizes of all images: for 60,000 a quarter of a second. That leaves an
    image in which a bit changed. Pillow refuses nearly all of those, but not all: it does not look at the checksum in
    the file, and took 3 of 1,000 for good. This function finds every one, and takes as long as the disk does.

    Parameters
    ----------
    folder : Path
        Holds ``train``, ``test`` and ``manifest.json``.
    progress : bool
        Show a progress bar.

    Raises
    ------
    staging.DamagedFolder
        With the name of the first file that is not as it was made.
    """
    folder = Path(folder)
    _check(folder)
    manifest = _read_manifest(folder)
    expected = {
        folder / part / _file_name(number): crc for part in _PARTS for number, crc in enumerate(manifest[part]["crc32"])
    }
    with ThreadPoolExecutor(_threads()) as threads:
        found = threads.map(lambda path: zlib.crc32(path.read_bytes()), expected)
        bar = tqdm(zip(expected, found, strict=True), "verifying", len(expected), unit="image", disable=not progress)
        for path, crc in bar:
            if crc != expected[path]:
                raise _damaged(path, folder, "its content is not what was written")


# ---------------------------------------------------------------------------------------------------------------------
# Which source


def _find_prepared(data_dir: Path, archive: Path | None, drawn: tuple[int, int]) -> tuple[Prepared, dict | None] | None:
    real, drawn_before = data_dir / "cifar10", _drawn_folder(data_dir, drawn)
    if real.exists():
        return _check(real)
    if not drawn_before.exists() or archive is not None or _archive_lying_in(data_dir) is not None:
        return None
    prepared, made_from = _check(drawn_before)
    if prepared.test_images != drawn[1]:
        raise _damaged(drawn_before, drawn_before, f"expected {drawn[1]:,} test images, found {prepared.test_images:,}")
    return prepared, made_from


def _make(data_dir: Path, archive: Path | None, drawn: tuple[int, int], download: bool, progress: bool) -> Prepared:
    archive = archive or _archive_lying_in(data_dir)
    why_not = ""
    if archive is None and download:
        archive, why_not = _download(data_dir)
    if archive is not None:
        made, folder = _read_archive(archive), data_dir / "cifar10"
        origin = f"made from {archive}"
    else:
        made, folder = _drawn(drawn), _drawn_folder(data_dir, drawn)
        origin = f"made in {folder}{why_not}"
    prepared = _export(made, folder, progress)
    print(f"Images: {prepared.source}, {origin}.{_how_to_get_real_ones(data_dir, prepared)}", flush=True)
    return prepared


def _how_to_get_real_ones(data_dir: Path, prepared: Prepared) -> str:
    if prepared.classes == CLASSES:
        return ""
    return (
        f" For the real ones, set CIFAR10_ARCHIVE or put {_OFFICIAL_ARCHIVE} into {data_dir}, and run "
        "`python -m helpers prepare`."
    )


def _archive_lying_in(data_dir: Path) -> Path | None:
    """The official archive or folder, or else the first tar file or folder with the same layout."""
    for name in (_OFFICIAL_ARCHIVE, _OFFICIAL_FOLDER):
        if (data_dir / name).exists():
            return data_dir / name
    others = sorted(data_dir.iterdir()) if data_dir.is_dir() else []
    return next((path for path in others if _looks_like_cifar10(path)), None)


def _looks_like_cifar10(path: Path) -> bool:
    if path.is_dir():
        return any(os.path.isfile(path / name) for name in ("data_batch_1", "test_batch"))
    if not path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return False
    try:
        if path.stat().st_size > _MAX_TOTAL_BYTES:
            return False
        with tarfile.open(path) as tar:
            for _, member in zip(range(16), tar, strict=False):  # a look at the first names: other archives may be long
                match = _MEMBER.fullmatch(member.name)
                if match and match[1] != "batches.meta":
                    return True
                if member.size > _MAX_MEMBER_BYTES:
                    return False
    except (tarfile.TarError, OSError, EOFError, zlib.error):
        pass  # whatever it is, nothing says that it is CIFAR-10
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Images that are about to be written


@dataclass(frozen=True)
class _Images:
    """`get[part](start, stop)` gives uint8 images of shape (stop - start, 32, 32, 3) and their labels."""

    source: str
    classes: tuple[str, ...]
    counts: dict[str, int]
    get: dict[str, Callable[[int, int], tuple[np.ndarray, np.ndarray]]]
    made_from: dict | None = None


def _drawn_folder(data_dir: Path, drawn: tuple[int, int]) -> Path:
    return data_dir / f"cifar10-drawn-{drawn[0]}"


def _drawn(counts: tuple[int, int]) -> _Images:
    def drawing(seed):
        return lambda start, stop: synthetic.draw(stop - start, seed, first=start)

    return _Images(
        source=f"drawn images ({counts[0]:,} + {counts[1]:,})",
        classes=synthetic.CLASSES,
        counts=dict(zip(_PARTS, counts, strict=True)),
        get={"train": drawing(config.SEED), "test": drawing(config.SEED + 1)},
    )


def _read_archive(path: Path) -> _Images:
    batches = _read_batches(path)
    numbers = sorted(int(name.rpartition("_")[2]) for name in batches if name.startswith("data_batch_"))
    if not numbers or "test_batch" not in batches:
        raise UnusableArchive(
            f"{path}: expected data_batch_1 to data_batch_5 (or some of them) and test_batch, as in "
            f"{_OFFICIAL_ARCHIVE}, found {', '.join(sorted(batches)) or 'none of them'}."
        )
    pixels, labels = zip(*(batches[f"data_batch_{number}"] for number in numbers), strict=True)
    train, test = (np.concatenate(pixels), np.concatenate(labels)), batches["test_batch"]
    counts = (len(train[1]), len(test[1]))

    def reading(pixels, labels):
        def get(start, stop):
            planes = pixels[start:stop].reshape(-1, 3, 32, 32)
            return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels[start:stop]

        return get

    return _Images(
        source="CIFAR-10" if counts == _OFFICIAL_COUNTS else f"CIFAR-10 subset ({counts[0]:,} + {counts[1]:,} images)",
        classes=CLASSES,
        counts=dict(zip(_PARTS, counts, strict=True)),
        get={"train": reading(*train), "test": reading(*test)},
        made_from=_fingerprint(path),
    )


def _fingerprint(path: Path) -> dict:
    """Tells archives apart without reading them."""
    return {"name": path.name, "bytes": path.stat().st_size if path.is_file() else None}


# ---------------------------------------------------------------------------------------------------------------------
# Archives: read in memory, so that no path in them can lead anywhere


def _read_batches(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    batches, total = {}, 0
    for name, data in _members(path):
        total += len(data)
        if total > _MAX_TOTAL_BYTES:
            raise UnusableArchive(f"{path}: expected batches of {_MAX_TOTAL_BYTES >> 20} MiB at most, found more.")
        if name in batches:
            raise UnusableArchive(f"{path}: expected {name} once, found it twice.")
        content = _unpickle(data, path, name)
        if name == "batches.meta":
            _check_class_names(content, path)
        else:
            batches[name] = _check_batch(content, path, name)
    return batches


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each batch."""
    if not path.exists():
        raise UnusableArchive(f"{path}: no such file or folder; is CIFAR10_ARCHIVE right?")
    try:
        members = _members_of_folder(path) if path.is_dir() else _members_of_tar(path)
        yield from members
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UnusableArchive(
            f"{path}: expected a tar file like {_OFFICIAL_ARCHIVE}, but reading it failed: "
            f"{str(error).splitlines()[0]}. Is it complete, and no web page saved under this name? Get it again."
        ) from error


def _members_of_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    inner = path / _OFFICIAL_FOLDER
    for file in sorted((inner if inner.is_dir() else path).iterdir()):
        if _MEMBER.fullmatch(file.name) and file.is_file():
            _check_size(file.stat().st_size, path, file.name)
            yield file.name, file.read_bytes()


def _members_of_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        for member in tar:
            if match := _MEMBER.fullmatch(member.name):
                if not member.isreg():
                    raise UnusableArchive(f"{path}: expected {member.name} to be a file, found a link or the like.")
                _check_size(member.size, path, member.name)
                yield match[1], tar.extractfile(member).read()
        while tar.fileobj.read(2**20):
            pass  # to the very end, where gzip keeps its checksum


def _check_size(size: int, path: Path, name: str) -> None:
    if size > _MAX_MEMBER_BYTES:
        raise UnusableArchive(
            f"{path}: expected {_MAX_MEMBER_BYTES >> 20} MiB at most for {name}, found {size >> 20} MiB."
        )


class _BatchUnpickler(pickle.Unpickler):
    """Builds arrays of numbers, bytes, text and plain containers, and nothing else."""

    def find_class(self, module: str, name: str):
        allowed = {
            ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct, which here needs none
            ("numpy", "dtype"): _number_dtype,
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,  # NumPy 1
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,  # NumPy 2
            ("numpy.core.numeric", "_frombuffer"): _array_of_bytes,  # pickle protocol 5
            ("numpy._core.numeric", "_frombuffer"): _array_of_bytes,
            ("_codecs", "encode"): _encode_latin1,  # how Python 3 writes bytes for Python 2
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}, which images do not need")
        return allowed[module, name]


def _empty_array(*_) -> np.ndarray:
    return np.empty(0, np.uint8)  # pickle fills it in; whatever shape the archive asks for here is not used


def _array_of_bytes(buffer: bytes, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _number_dtype(name: str | bytes, *flags) -> np.dtype:
    name = name.decode("ascii") if isinstance(name, bytes) else name
    if not re.fullmatch(r"[|<>=]?[iu][1248]", name):
        raise pickle.UnpicklingError(f"it wants an array of {name!r}, expected whole numbers")
    return np.dtype(name)


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it wants text encoded as {encoding!r}, expected latin1")
    return text.encode("latin1")


def _unpickle(data: bytes, path: Path, name: str) -> dict:
    try:
        content = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything, as pickle's documentation says
        raise UnusableArchive(f"{path}: {name} is no batch of CIFAR-10: {error}.") from error
    if not isinstance(content, dict):
        raise UnusableArchive(f"{path}: expected a dictionary in {name}, found {type(content).__name__}.")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}


def _check_batch(batch: dict, path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = batch.get("data"), batch.get("labels")
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (_PIXELS,)):
        found = f"{pixels.dtype} of shape {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UnusableArchive(f"{path}: expected uint8 of shape (images, {_PIXELS}) as data of {name}, found {found}.")
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not (isinstance(labels, list) and all(type(label) is int and 0 <= label <= 9 for label in labels)):
        raise UnusableArchive(f"{path}: expected labels from 0 to 9 in {name}, found something else.")
    if not len(labels) == len(pixels) > 0:
        raise UnusableArchive(
            f"{path}: expected as many labels as images in {name}, found {len(labels)} and {len(pixels)}."
        )
    return pixels, np.array(labels, np.int64)


def _check_class_names(meta: dict, path: Path) -> None:
    names = meta.get("label_names")
    if names not in (list(CLASSES), [name.encode() for name in CLASSES]):
        raise UnusableArchive(f"{path}: expected the class names of CIFAR-10 in batches.meta, found {names!r}.")


def _download(data_dir: Path) -> tuple[Path | None, str]:
    """Download the official archive, if the internet is there: its path, or None and the reason."""
    from torchvision import datasets  # here, since it imports torch, which takes seconds and is hardly ever needed

    official = datasets.CIFAR10
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_CONNECT_SECONDS)  # torchvision has no argument for it
    try:
        with staging.scratch(data_dir / official.filename) as folder:
            datasets.utils.download_url(official.url, folder, official.filename, official.tgz_md5)
            return (folder / official.filename).replace(data_dir / _OFFICIAL_ARCHIVE), ""
    except staging.NotEnoughDisk:
        raise
    except (OSError, RuntimeError, HTTPException) as error:  # RuntimeError: the checksum
        return None, f", as CIFAR-10 could not be downloaded ({error})"
    finally:
        socket.setdefaulttimeout(timeout_before)


# ---------------------------------------------------------------------------------------------------------------------
# The folder of PNG files


def _export(images: _Images, folder: Path, progress: bool) -> Prepared:
    total = sum(images.counts.values())
    staging.check_free(folder.parent, total, _BYTES_PER_IMAGE)
    manifest = {
        "format": _FORMAT,
        "source": images.source,
        "classes": images.classes,
        "made_from": images.made_from,
    }
    # Only labels and manifest are forced to the disk: if a power cut takes images, the manifest shows that
    with staging.folder(folder) as new, tqdm(None, "writing", total, unit="image", disable=not progress) as bar:
        for part in _PARTS:
            manifest[part] = _write_part(images, part, new / part, bar)
        staging.write(new / "manifest.json", json.dumps(manifest), durable=True)
    return _prepared(folder, manifest)


def _write_part(images: _Images, part: str, folder: Path, bar: tqdm) -> dict:
    folder.mkdir()

    def write(start: int):
        pixels, labels = images.get[part](start, min(start + _CHUNK, images.counts[part]))
        files = [_write_png(folder / _file_name(number), image) for number, image in enumerate(pixels, start)]
        return files, labels

    labels, sizes, checksums = [], [], []
    # Threads, not processes: they start at once, and end with us if we are killed. Two take 0.65 of the time of one.
    with ThreadPoolExecutor(_threads()) as threads:
        for files, chunk_labels in threads.map(write, range(0, images.counts[part], _CHUNK)):
            labels += chunk_labels.tolist()
            sizes += [size for size, _ in files]
            checksums += [crc for _, crc in files]
            bar.update(len(files))
    rows = [f"{_file_name(number)},{label}\n" for number, label in enumerate(labels)]
    table = "".join(["file,label\n", *rows])
    staging.write(folder / "labels.csv", table, durable=True)
    return {"labels_sha256": hashlib.sha256(table.encode()).hexdigest(), "bytes": sizes, "crc32": checksums}


def _write_png(path: Path, image: np.ndarray) -> tuple[int, int]:
    buffer = io.BytesIO()
    # Pillow's usual compression: level 1 saves a tenth of the time, but its files are larger than what is usual
    Image.fromarray(image).save(buffer, "PNG")
    data = buffer.getvalue()
    path.write_bytes(data)
    return len(data), zlib.crc32(data)


def _check(folder: Path) -> tuple[Prepared, dict | None]:
    """Compare names and sizes of all images, and the labels, with the manifest."""
    manifest = _read_manifest(folder)
    for part in _PARTS:
        _check_part(folder, part, manifest[part])
    return _prepared(folder, manifest), manifest["made_from"]


def _check_part(folder: Path, part: str, expected: dict) -> None:
    try:
        digest = hashlib.sha256((folder / part / "labels.csv").read_bytes()).hexdigest()
        with os.scandir(folder / part) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".png")}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _damaged(Path(error.filename), folder, "it is missing") from error
    if digest != expected["labels_sha256"]:
        raise _damaged(folder / part / "labels.csv", folder, "its content is not what was written")
    for number, size in enumerate(expected["bytes"]):
        found = sizes.pop(_file_name(number), None)
        if found != size:
            what = "it is missing" if found is None else f"expected {size:,} bytes, found {found:,}"
            raise _damaged(folder / part / _file_name(number), folder, what)
    if sizes:
        raise _damaged(folder / part / min(sizes), folder, "this image was added")


def _read_manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise _damaged(path, folder, "it is missing") from error
    except ValueError as error:
        raise _damaged(path, folder, f"it is no JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _damaged(path, folder, f"expected format {_FORMAT}; another version of the course made this folder")
    return manifest


def _damaged(path: Path, folder: Path, what: str) -> staging.DamagedFolder:
    return staging.DamagedFolder(f"{path}: {what}. Delete the folder {folder} and run `python -m helpers prepare`.")


def _prepared(folder: Path, manifest: dict) -> Prepared:
    return Prepared(
        train=folder / "train",
        test=folder / "test",
        source=manifest["source"],
        classes=tuple(manifest["classes"]),
        train_images=len(manifest["train"]["bytes"]),
        test_images=len(manifest["test"]["bytes"]),
    )


def _file_name(number: int) -> str:
    return f"{number:05d}.png"


def _threads() -> int:
    return min(config.cores(), _MAX_THREADS)
