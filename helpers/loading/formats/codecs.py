"""How the pixels of an image become bytes in a key-value store, and back."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import lz4.block
import numpy as np
from PIL import Image

from helpers.loading.formats.writing import UnusableSamples

_PNG_CHANNELS = (1, 2, 3, 4)  # grey, grey with alpha, RGB, RGB with alpha


@dataclass(frozen=True)
class Codec:
    """An encoding.

    Attributes
    ----------
    encode : callable
        Makes bytes of an image: uint8 of shape (channels, height, width).
    decode : callable
        Makes the image of its bytes (an array) and its shape.
    """

    encode: Callable[[np.ndarray], bytes]
    decode: Callable[[np.ndarray, Sequence[int]], np.ndarray]


def _to_png(image: np.ndarray) -> bytes:
    if len(image) not in _PNG_CHANNELS:
        raise UnusableSamples(f"PNG has images of 1 to 4 channels, found {len(image)}. Choose another codec.")
    pixels, file = image.transpose(1, 2, 0), io.BytesIO()
    Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def _from_png(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    channels, height, width = shape
    return np.asarray(Image.open(io.BytesIO(data))).reshape(height, width, channels).transpose(2, 0, 1)


def _to_lz4(image: np.ndarray) -> bytes:
    return lz4.block.compress(image, store_size=False)


def _from_lz4(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.frombuffer(lz4.block.decompress(data, uncompressed_size=math.prod(shape)), np.uint8).reshape(shape)


CODECS: Mapping[str, Codec] = {
    "raw": Codec(np.ndarray.tobytes, np.ndarray.reshape),
    "png": Codec(_to_png, _from_png),
    "lz4": Codec(_to_lz4, _from_lz4),
}
"""The codecs, by name."""
