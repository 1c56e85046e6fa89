"""Other libraries that load or augment images, for the benchmarks to compare with: the extra ``peers``.

Each is used as its own documentation advises for shuffled batches from a local disk, in one process; a function
for each way to read writes the files that the library wants, and returns an epoch's batches. The first batch
of each is compared with the images. Two things favour those that read files of their own or ours: webdataset, tfrecord,
DALI and streamed datasets shuffle within a buffer of about 1,000 images, and litdata within a file, where ours shuffle
all; and of those that read raw pixels, only ours and numpy.load compare checksums.

FFCV is left out: its last release, of 2023, must be compiled, and that stops without OpenCV's development files.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from helpers.data import cifar10
from helpers.loading import datasets, formats
from helpers.loading.formats.sampling import ShuffledBatches
from tests.bench.timing import BATCH, Variant, failure

# Without the override, the clouds' clients that come along (boto3, oci) take python-dateutil back to 2, and
# `streaming`, which wants NumPy below 2.2, and `datasets` come in releases of years ago. All work with the lock's.
INSTALL = ".venv/bin/uv pip install --override requirements.lock -e '.[peers]'"
BUFFER = 1_000  # images to shuffle among, as in WebDataset's documentation; DALI's default is 1,024
SHAPE = (3, 32, 32)
PADDING = 4
NORMALIZE = transforms.Normalize(cifar10.MEAN, cifar10.STD)
TRANSFORM = transforms.Compose([transforms.ToTensor(), NORMALIZE])


@dataclass(frozen=True)
class Source:
    """The images in all the ways that a library may want them.

    Attributes
    ----------
    images : ndarray of uint8, shape (N, 3, 32, 32)
    labels : ndarray of int64, shape (N,)
    files : Path
        The folder with one PNG an image.
    packs : dict of str to PackedDataset
        Our packs, by format.
    folder : Path
        Room for files of one's own.
    """

    images: np.ndarray
    labels: np.ndarray
    files: Path
    packs: dict[str, formats.PackedDataset]
    folder: Path

    @cached_property
    def known(self) -> dict[int, int]:
        """The label of each image, by the image's hash."""
        return {hash(image.tobytes()): int(label) for image, label in zip(self.images, self.labels, strict=True)}

    def pack(self, name: str, pattern: str) -> list[str]:
        """The files of one of our packs."""
        return [str(path) for path in sorted(Path(self.packs[name].path).glob(pattern))]

    def png(self) -> tuple[list[str], list[int]]:
        """The PNG files and their labels."""
        dataset = datasets.PngDataset(self.files)
        return [str(self.files / name.decode()) for name in dataset.files], dataset.labels.tolist()


# -------------------------------------------------------------------------------------------- our packs, read by them


def tar_by_webdataset(source: Source) -> Iterable:
    import webdataset

    shards = source.pack("tar", "*.tar")
    dataset = webdataset.WebDataset(shards, shardshuffle=100).shuffle(BUFFER).decode().to_tuple("npy", "cls")
    return webdataset.WebLoader(dataset.batched(BATCH), batch_size=None)


def tar_by_dali(source: Source) -> Iterable:
    from nvidia.dali import fn
    from wds2idx import IndexCreator  # a script of DALI

    shards = source.pack("tar", "*.tar")
    indices = [str(source.folder / f"{Path(shard).stem}.idx") for shard in shards]
    for shard, index in zip(shards, indices, strict=True):
        with IndexCreator(shard, index) as creator:
            creator.create_index()

    def read():
        images, labels = fn.readers.webdataset(
            paths=shards, index_paths=indices, ext=["npy", "cls"], random_shuffle=True, name="reader"
        )
        return fn.decoders.numpy(images), labels - np.uint8(ord("0"))  # a label is a digit, as text

    return _dali(read)


def tfrecord_by_tfrecord(source: Source) -> Iterable:
    from tfrecord.torch.dataset import TFRecordDataset

    (shard,) = source.pack("tfrecord", "*.tfrecord")
    return DataLoader(
        TFRecordDataset(
            shard, f"{shard}.idx", {"image": "byte", "shape": "int", "label": "int"},
            shuffle_queue_size=BUFFER, transform=_from_example,
        ),
        BATCH,
    )  # fmt: skip


def _from_example(example: dict) -> tuple[np.ndarray, int]:
    return np.frombuffer(example["image"], np.uint8).reshape(example["shape"]), example["label"][0]


def tfrecord_by_dali(source: Source) -> Iterable:
    from nvidia.dali import fn, tfrecord

    shards = source.pack("tfrecord", "*.tfrecord")
    features = {
        "image": tfrecord.FixedLenFeature((), tfrecord.string, ""),
        "label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
    }

    def read():
        example = fn.readers.tfrecord(
            path=shards, index_path=[f"{shard}.idx" for shard in shards], features=features,
            random_shuffle=True, name="reader",
        )  # fmt: skip
        return fn.reshape(example["image"], shape=SHAPE), example["label"]

    return _dali(read)


def parquet_by_datasets(source: Source) -> Iterable:
    """Arrow files are made of the pack, and mapped into memory."""
    import datasets as huggingface

    dataset = huggingface.load_dataset(
        "parquet", data_files=source.pack("parquet", "*.parquet"), cache_dir=str(source.folder), split="train"
    )
    return DataLoader(dataset.with_transform(_from_rows), BATCH, shuffle=True)


def parquet_streamed(source: Source) -> Iterable:
    import datasets as huggingface

    dataset = huggingface.load_dataset(
        "parquet", data_files=source.pack("parquet", "*.parquet"), streaming=True, split="train"
    )
    return DataLoader(dataset.shuffle(buffer_size=BUFFER).map(_from_row, remove_columns=dataset.column_names), BATCH)


def _from_rows(rows: dict) -> dict:
    return {"image": [np.frombuffer(image, np.uint8).reshape(SHAPE) for image in rows["image"]], "label": rows["label"]}


def _from_row(row: dict) -> dict:
    return {"image": np.frombuffer(row["image"], np.uint8).reshape(SHAPE), "label": row["label"]}


def zip_by_numpy(source: Source) -> Iterable:
    (archive,) = source.pack("zip", "*.zip")
    return DataLoader(Archive(archive, source.labels), BATCH, shuffle=True)


class Archive(Dataset):
    """Images in a zip archive, as NumPy reads an .npz file."""

    def __init__(self, path: str, labels: np.ndarray):
        self.arrays, self.labels = np.load(path), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.arrays[f"{index:08d}"], self.labels[index]


# ---------------------------------------------------------------------------------------- raw pixels in their own files


def raw_by_streaming(source: Source) -> Iterable:
    pairs = zip(source.images, source.labels, strict=True)
    samples = ({"image": image, "label": int(label)} for image, label in pairs)
    return _streaming(source.folder / "mds-raw", "ndarray:uint8:3,32,32", samples)


def raw_by_litdata(source: Source) -> Iterable:
    samples = [(image, int(label)) for image, label in zip(source.images, source.labels, strict=True)]
    return _litdata(source.folder / "litdata-raw", samples)


def raw_by_datasets(source: Source) -> Iterable:
    """An Arrow file with arrays of one shape, mapped into memory."""
    import datasets as huggingface

    features = huggingface.Features(image=huggingface.Array3D(SHAPE, "uint8"), label=huggingface.Value("int64"))
    path = str(source.folder / "arrow-raw")
    huggingface.Dataset.from_dict({"image": source.images, "label": source.labels}, features).save_to_disk(path)
    return DataLoader(huggingface.load_from_disk(path).with_format("torch", dtype=torch.uint8), BATCH, shuffle=True)


# ------------------------------------------------------------------------------------------------------ from PNG images


def png_by_webdataset(source: Source) -> Iterable:
    import webdataset

    pattern = str(source.folder / "png-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=10_000, verbose=0) as shards:
        for number, (path, label) in enumerate(zip(*source.png(), strict=True)):
            shards.write({"__key__": f"{number:08d}", "png": Path(path).read_bytes(), "cls": label})
    dataset = webdataset.WebDataset(sorted(map(str, source.folder.glob("png-*.tar"))), shardshuffle=100)
    dataset = dataset.shuffle(BUFFER).decode("pil").to_tuple("png", "cls").map_tuple(TRANSFORM, int)
    return webdataset.WebLoader(dataset.batched(BATCH), batch_size=None)


def png_by_streaming(source: Source) -> Iterable:
    images = datasets.PngDataset(source.files)
    samples = ({"image": images[index][0], "label": images[index][1]} for index in range(len(images)))
    return _streaming(source.folder / "mds-png", "png", samples, TRANSFORM)


def png_by_litdata(source: Source) -> Iterable:
    return _litdata(source.folder / "litdata-png", list(zip(*source.png(), strict=True)), _normalize_bytes)


def _normalize_bytes(sample: dict) -> dict:
    """From a tensor of bytes, which `litdata` decodes a PNG to."""
    return sample | {"image": NORMALIZE(sample["image"].float() / 255)}


def png_by_datasets(source: Source) -> Iterable:
    import datasets as huggingface

    paths, labels = source.png()
    dataset = huggingface.Dataset.from_dict({"image": paths, "label": labels})
    dataset = dataset.cast_column("image", huggingface.Image())
    return DataLoader(dataset.with_transform(_normalized), BATCH, shuffle=True)


def _normalized(rows: dict) -> dict:
    return {"image": [TRANSFORM(image) for image in rows["image"]], "label": rows["label"]}


def png_by_dali(source: Source) -> Iterable:
    from nvidia.dali import fn

    paths, labels = source.png()
    mean, std = ([255 * value for value in values] for values in (cifar10.MEAN, cifar10.STD))

    def read():
        encoded, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, name="reader")
        return fn.crop_mirror_normalize(fn.decoders.image(encoded), mean=mean, std=std), label

    return _dali(read)


# ----------------------------------------------------------------------- batches of our npy pack, cropped and mirrored


def augmented_by_kornia(source: Source) -> Iterable:
    """It takes no bytes, so that they become float32 from 0 to 1 first."""
    from kornia import augmentation

    augment = torch.nn.Sequential(
        augmentation.RandomCrop(SHAPE[1:], padding=PADDING), augmentation.RandomHorizontalFlip()
    )
    return DataLoader(
        source.packs["npy"], BATCH, shuffle=True, collate_fn=lambda batch: (augment(batch.images / 255), batch.labels)
    )


def augmented_by_dali(source: Source) -> Iterable:
    from nvidia.dali import fn, types

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for indices in ShuffledBatches(len(source.images), BATCH):
            batch = source.packs["npy"].__getitems__(indices)
            yield batch.images.numpy(), batch.labels.numpy()

    def read():
        images, labels = fn.external_source(batches, num_outputs=2, layout=["CHW", ""], cycle="raise")
        offsets = [float(offset) for offset in range(-PADDING, PADDING + 1)]
        corner = fn.cast(fn.random.uniform(values=offsets, shape=2), dtype=types.INT32)
        images = fn.slice(images, start=corner, shape=SHAPE[1:], axis_names="HW", out_of_bounds_policy="pad")
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    return _dali(read, reader=None)


# ------------------------------------------------------------------------------------------------ what two ways share


def _dali(read: Callable, reader: str | None = "reader") -> Iterable:
    """A pipeline on the CPU, with one thread."""
    from nvidia.dali import pipeline_def
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    pipeline = pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)(read)()
    return DALIGenericIterator(
        pipeline, ["image", "label"], reader_name=reader, last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )


def _streaming(folder: Path, image: str, samples: Iterable[dict], transform: Callable | None = None) -> Iterable:
    import streaming

    class Transforming(streaming.StreamingDataset):
        def __getitem__(self, index: int) -> dict:
            sample = super().__getitem__(index)
            return sample | {"image": transform(sample["image"])}

    with streaming.MDSWriter(out=str(folder), columns={"image": image, "label": "int"}) as shards:
        for sample in samples:
            shards.write(sample)
    dataset = Transforming if transform else streaming.StreamingDataset
    return DataLoader(dataset(local=str(folder), shuffle=True, batch_size=BATCH), BATCH)


def _litdata(folder: Path, samples: list[tuple], transform: Callable | None = None) -> Iterable:
    import litdata

    litdata.optimize(_litdata_sample, samples, str(folder), num_workers=1, chunk_bytes="64MB")
    dataset = litdata.StreamingDataset(str(folder), shuffle=True, transform=transform)
    return litdata.StreamingDataLoader(dataset, batch_size=BATCH)


def _litdata_sample(sample: tuple) -> dict:
    import litdata

    image, label = sample
    return {"image": litdata.Image(path=image) if isinstance(image, str) else image, "label": label}


# --------------------------------------------------------------------------------------------------------------- all


@dataclass(frozen=True)
class Peer:
    """A way to load or augment images with another library.

    Attributes
    ----------
    name : str
        The library, and what it reads.
    package : str
        What to install.
    begin : callable
        Takes the `Source`, returns an iterable of batches.
    delivers, beside : str
        As in `timing.Variant`.
    """

    name: str
    package: str
    begin: Callable[[Source], Iterable]
    delivers: str
    beside: str


DALI = "nvidia-dali-cuda130"

PEERS = (
    Peer("webdataset, our tar", "webdataset", tar_by_webdataset, "uint8", "tar, batches"),
    Peer("DALI, our tar", DALI, tar_by_dali, "uint8", "tar, batches"),
    Peer("numpy.load, our zip", "numpy", zip_by_numpy, "uint8", "zip, batches"),
    Peer("tfrecord, our tfrecord", "tfrecord", tfrecord_by_tfrecord, "uint8", "tfrecord, batches"),
    Peer("DALI, our tfrecord", DALI, tfrecord_by_dali, "uint8", "tfrecord, batches"),
    Peer("datasets, our parquet as Arrow", "datasets", parquet_by_datasets, "uint8", "npy, batches"),
    Peer("datasets, our parquet streamed", "datasets", parquet_streamed, "uint8", "parquet, batches by row group"),
    Peer("datasets, Arrow of arrays", "datasets", raw_by_datasets, "uint8", "npy, batches"),
    Peer("streaming, MDS of arrays", "mosaicml-streaming", raw_by_streaming, "uint8", "npy, batches"),
    Peer("litdata, chunks of arrays", "litdata", raw_by_litdata, "uint8", "npy, batches"),
    Peer("webdataset, tar of PNG", "webdataset", png_by_webdataset, "float32", "lmdb, png, normalized"),
    Peer("streaming, MDS of PNG", "mosaicml-streaming", png_by_streaming, "float32", "lmdb, png, normalized"),
    Peer("litdata, chunks of PNG", "litdata", png_by_litdata, "float32", "lmdb, png, normalized"),
    Peer("datasets, PNG files", "datasets", png_by_datasets, "float32", "lmdb, png, normalized"),
    Peer("DALI, PNG files", DALI, png_by_dali, "float32", "lmdb, png, normalized"),
)

AUGMENTING = (
    Peer("npy, batches, kornia", "kornia", augmented_by_kornia, "0 to 1", "npy, batches, crop_and_flip"),
    Peer("npy, batches, DALI", DALI, augmented_by_dali, "uint8", "npy, batches, crop_and_flip"),
)


def check(images: torch.Tensor, labels: torch.Tensor, source: Source) -> None:
    """Raise ValueError if a batch has anything but our images with their labels."""
    if images.dtype == torch.float32:
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar10.MEAN, cifar10.STD))
        images = (images * std + mean).mul(255).round().to(torch.uint8)
    if images.dtype != torch.uint8 or images.shape != (BATCH, *SHAPE):
        raise ValueError(f"expected {BATCH} images of {SHAPE}, found {images.dtype} of {tuple(images.shape)}")
    found = [source.known.get(hash(image.numpy().tobytes())) for image in images]
    if found != labels.flatten().tolist():
        raise ValueError("expected the images with their labels, found others")


def variants(
    source: Source, peers: Sequence[Peer] = PEERS, check: Callable[[torch.Tensor, torch.Tensor, Source], None] = check
) -> dict[str, Variant]:
    """Begin all that are installed; name the others, and those that fail."""
    begun, there = {}, installed(peers)
    if missing := {peer.package: None for peer in peers if peer.package not in there}:
        print(f"Not installed, so left out: {', '.join(missing)}. To compare with them too: {INSTALL}")
    print("The other libraries write the files that they want, and begin ...", flush=True)
    for peer in peers:
        if peer.package not in there:
            continue
        try:
            with quiet():
                loader = peer.begin(source)
                variant = Variant(lambda loader=loader: map(_pair, loader), peer.delivers, peer.beside)
                check(*next(variant.stream), source)
        except Exception as error:
            print(failure(peer.name, error))
        else:
            begun[peer.name] = variant
    return begun


def installed(peers: Sequence[Peer] = PEERS) -> list[str]:
    """The packages of `peers` that are installed."""
    found = {distribution.name for distribution in importlib.metadata.distributions()}
    return [package for package in dict.fromkeys(peer.package for peer in peers) if package in found]


@contextlib.contextmanager
def contained(folder: Path):
    """Let the libraries keep their caches and locks in `folder`."""
    before = dict(os.environ)
    os.environ |= {"TMPDIR": str(folder), "HF_HOME": str(folder / "huggingface")}
    tempfile.tempdir = None  # it is asked for anew
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        tempfile.tempdir = None


@contextlib.contextmanager
def quiet():
    """Hide progress bars, warnings and advice."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


def _pair(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of a batch, in whichever way a library gives them."""
    if isinstance(batch, list) and len(batch) == 1:  # DALI: a dictionary for each pipeline
        (batch,) = batch
    return (batch["image"], batch["label"]) if isinstance(batch, dict) else tuple(batch)
