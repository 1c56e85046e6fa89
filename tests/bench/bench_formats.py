"""How fast each packed format is written and read: ``python -m tests.bench.bench_formats``.

50,000 images of 32×32, drawn; shuffled batches of 128 through a standard DataLoader without workers, with one
thread of PyTorch, on one core: images a second and core. Naive is one PNG an image, with ToTensor and Normalize. The
limit is the gather alone, index_select into a tensor kept; where npy is normalized, it is normalizing one batch in
memory. All variants are timed interleaved, for a moment in each round; ratios are medians of those of the rounds. Files
are in the page cache; every checksum is on. The libraries of the extra ``peers`` that are installed are timed in the
same rounds.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from helpers import config
from helpers.data import cifar10, synthetic
from helpers.loading import datasets, formats
from helpers.loading.formats import parquet
from helpers.loading.formats.sampling import ShuffledBatches
from helpers.training import models
from tests.bench import peers, timing
from tests.bench.timing import BATCH, Variant

COUNT = 50_000
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "lmdb", "h5py", "pyarrow")

KINDS = {
    "npy": ("npy", {}),
    "lmdb, raw": ("lmdb", {}),
    "lmdb, lz4": ("lmdb", {"codec": "lz4"}),
    "lmdb, png": ("lmdb", {"codec": "png"}),
    "hdf5": ("hdf5", {}),
    "tar": ("tar", {"shard_bytes": 2**25}),  # several, for WebDataset to shuffle
    "zip": ("zip", {}),
    "tfrecord": ("tfrecord", {}),
    "parquet": ("parquet", {}),
}


class InMemory(Dataset):
    """Tensors in memory, batches gathered by index."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.as_tensor(indices)
        return self.images.index_select(0, places), self.labels[places]


class Normalized:
    """Collates to what the naive variant gives: normalized float32."""

    def __init__(self):
        mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (cifar10.MEAN, cifar10.STD))
        self.mean, self.scale = mean, 1 / std

    def __call__(self, batch: formats.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        # In place: torch.addcmul, of which the shapes differ, takes 4 times as long
        return batch.images.float().sub_(self.mean).mul_(self.scale), batch.labels


class NormalizedByLayer:
    """Collates, and normalizes as the course's networks do."""

    def __init__(self):
        self.layer = models.Normalize()

    def __call__(self, batch: formats.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(batch.images), batch.labels


def main() -> None:
    """Print for each format how long packing took and its size, and for each way to read it images a second."""
    torch.set_num_threads(1)
    print(timing.provenance([*PACKAGES, *(name for name in peers.installed() if name not in PACKAGES)]))
    images, labels = synthetic.draw(COUNT, config.SEED)
    images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    with tempfile.TemporaryDirectory() as folder:
        prepared = cifar10.prepare(data_dir=Path(folder), drawn=(COUNT, 10), download=False, progress=False)
        print("Packing 50,000 images, medians of 3 where more than one is timed:")
        packs = pack_all(images, labels, Path(folder), prepared.train)
        with timing.one_core(), peers.contained(Path(folder)):
            theirs = peers.variants(peers.Source(images, labels, prepared.train, packs, Path(folder)))
            ours = all_variants(packs, prepared.train, torch.from_numpy(images), torch.from_numpy(labels))
            limit = {"gather alone (the limit)": Variant(lambda: gather(torch.from_numpy(images)))}
            variants = ours | theirs | limit
            rates = timing.interleaved(variants)
        timing.report(rates, variants)
        timing.report_beside(rates, variants)


def pack_all(images: np.ndarray, labels: np.ndarray, folder: Path, naive: Path) -> dict[str, formats.PackedDataset]:
    """Pack in every format; print time and size."""
    packs = {}
    print(f"{'PNG folder':12} {size(naive) / 1e6:6.1f} MB")
    for kind, (name, options) in KINDS.items():
        rates = []
        for _ in range(3 if name in ("npy", "lmdb") and "png" not in kind else 1):
            path = folder / kind.replace(", ", "-")
            shutil.rmtree(path, ignore_errors=True)
            begin = time.perf_counter()
            formats.FORMATS[name].pack(images, labels, path, **options)
            rates.append(COUNT / (time.perf_counter() - begin))
        packs[kind] = formats.FORMATS[name].PackedDataset(path)
        print(f"{kind:12} {size(path) / 1e6:6.1f} MB, packed {statistics.median(rates):9,.0f} images/s", flush=True)
    return packs


def all_variants(packs, naive: Path, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Variant]:
    """Name each of our ways to read, naive first."""
    normalize = transforms.Compose([transforms.ToTensor(), transforms.Normalize(cifar10.MEAN, cifar10.STD)])
    variants = {"naive": Variant(loader(datasets.PngDataset(naive, normalize)), "float32")}
    for kind, dataset in packs.items():
        variants[f"{kind}, by item"] = Variant(loader(formats.ByItem(dataset)))
        variants[f"{kind}, batches"] = Variant(loader(dataset, dataset.collate))
    npy = packs["npy"]
    by_group = parquet.RowGroupBatches(packs["parquet"], BATCH)
    variants["parquet, batches by row group"] = Variant(loader(packs["parquet"], npy.collate, by_group))
    one = npy.__getitems__(range(BATCH))
    for name, normalized in {"normalized": Normalized(), "normalized by the layer": NormalizedByLayer()}.items():
        alone = f"{name.replace('ized', 'izing')} alone"
        by_array = ShuffledBatches(COUNT, BATCH)
        variants[f"npy, {name}"] = Variant(loader(npy, normalized), "float32", limit=alone)
        variants[f"npy, ShuffledBatches, {name}"] = Variant(loader(npy, normalized, by_array), "float32", limit=alone)
        variants[alone] = Variant(lambda collate=normalized: repeated(lambda: collate(one)), "float32")
    variants["lmdb, png, normalized"] = Variant(loader(packs["lmdb, png"], Normalized()), "float32")
    variants["npy, ShuffledBatches"] = Variant(loader(npy, npy.collate, ShuffledBatches(COUNT, BATCH)))
    in_memory = InMemory(images, labels)
    variants["tensors in memory"] = Variant(loader(in_memory, lambda batch: batch))
    by_array = ShuffledBatches(COUNT, BATCH)
    variants["tensors, ShuffledBatches"] = Variant(loader(in_memory, lambda batch: batch, by_array))
    variants["DataLoader alone"] = Variant(loader(Nothing(), lambda batch: batch), "indices")
    return variants


class Nothing(Dataset):
    """Gives the indices back: what is left is the DataLoader."""

    def __len__(self) -> int:
        return COUNT

    def __getitems__(self, indices: list[int]) -> tuple[list[int], None]:
        return indices, None


def loader(dataset: Dataset, collate: Callable | None = None, batches: Iterable | None = None) -> DataLoader:
    if batches is not None:
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate)
    return DataLoader(dataset, BATCH, shuffle=True, collate_fn=collate)


def repeated(make: Callable[[], tuple]) -> Iterator[tuple]:
    return (make() for _ in range(COUNT // BATCH))


def gather(images: torch.Tensor) -> Iterator[tuple[torch.Tensor, None]]:
    kept = torch.empty(BATCH, *images.shape[1:], dtype=torch.uint8)
    for places in torch.randperm(COUNT)[: COUNT // BATCH * BATCH].split(BATCH):
        yield torch.index_select(images, 0, places, out=kept), None


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
