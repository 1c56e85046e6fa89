"""Packs the course's images once, shared by a class, and loads batches of bytes from the pack."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from helpers import config
from helpers.data import cifar10, manifests, sharing
from helpers.loading import datasets
from helpers.loading.formats import mapped, packing
from stepscope.base import machine, staging

_BYTES_PER_IMAGE = 3_200  # 3,072 of pixels, its label, its share of the checksums
_DIGEST = 12  # hexadecimal digits at the end of a pack's name, which identify its content


def prepare(data: cifar10.Prepared) -> mapped.Npy:
    """Return the training images as bytes in one file; the first call packs them, later ones only open the pack.

    The pack lies beside the images, below ``COURSE_DATA``, and appears whole or not at all. Many processes may call
    this at once: one packs, the others wait. If the images have changed, they are packed again. Raises
    `datasets.UnreadableImage` if an image is damaged; `staging.NotEnoughDisk` if the disk has no room.
    """
    source = data.train.parent
    folder = folder_of(source)

    def pack() -> None:
        outdated = list(folder.parent.glob(f"{source.name}-{'?' * _DIGEST}"))
        staging.check_free(folder.parent, data.train_images, _BYTES_PER_IMAGE)
        images = datasets.PngDataset(data.train, _pixels)
        workers = min(machine.cores(), manifests.MOST_WORKERS, len(images) // 1000)  # starting one takes as long
        pixels = (image for batch, _ in DataLoader(images, 100, num_workers=workers) for image in batch)
        packing.pack(mapped.Npy, pixels, images.labels.tolist(), folder)
        for each in outdated:  # not before: somebody may still use it, and the new one may not fit
            shutil.rmtree(each, ignore_errors=True)
        print(f"Packed {data.train_images:,} images into {folder}.", flush=True)

    sharing.once(folder.parent, folder.exists, pack)
    return mapped.Npy(folder)


def folder_of(images: Path) -> Path:
    """Return the folder of the pack of prepared images, which lie in the folder `images`; it need not exist yet."""
    manifest = (images / manifests.NAME).read_text(encoding="utf-8")
    made_of = f"{manifest} version {packing.VERSION}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:_DIGEST]
    return images.parent / "packs" / f"{images.name}-{digest}"


def _pixels(image: Image.Image) -> np.ndarray:
    return np.array(image).transpose(2, 0, 1)


def loader(images: mapped.Npy, batch: int) -> DataLoader:
    """Return a loader of batches in random order, the same for every new loader.

    A last batch that is not full is left out, so that all steps cost the same. There are no workers, because the
    transfer of a batch from a worker to the main process takes longer than reading it from a pack: about 2 ms against
    0.1 ms for 128 images. A batch is images, uint8 of shape (batch, 3, 32, 32), and labels, int64 of shape (batch,); in
    pinned memory if there is a GPU.
    """
    return DataLoader(
        images,
        batch,
        shuffle=True,
        drop_last=True,
        collate_fn=images.collate,
        pin_memory=config.device().type == "cuda",
        generator=torch.Generator().manual_seed(config.SEED),
    )
