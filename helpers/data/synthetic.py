"""Draws labelled images that stand in for CIFAR-10 and for photos: the same pixels on every machine, for ever.

Each image shows one of ten figures in front of a cloudy background, under spots of other colours and grain. Some are
hardly visible, so that a small network learns the classes in an epoch well, but not perfectly. The grain makes PNG
files as large as those of CIFAR-10. Photos show the same figures on a finer grid.
"""

import numpy as np

_NAMES = "disc", "ring", "square", "frame", "triangle", "cross", "bars", "checkers", "two dots", "crescent"
CLASSES = tuple(f"drawn: {name}" for name in _NAMES)
"""Names of the classes 0 to 9."""

_SIDE = 32  # pixels
_BYTES = 2048  # random bytes for an image, a few more than it takes; 32 of them are one count of Philox

_COLOURS = np.array(
    [
        [205, 60, 50], [225, 140, 45], [215, 205, 70], [120, 185, 60], [40, 130, 75],
        [60, 190, 190], [60, 120, 205], [75, 60, 170], [160, 80, 185], [220, 120, 160],
    ],
    np.int32,
)  # fmt: skip
# The strength of the grain, chosen at random: found by matching the sizes of 5,080 real images, quantile by quantile
_GRAIN = np.array([4, 9, 13, 16, 18, 20, 23, 25, 27, 29, 31, 33, 35, 38, 42, 50], np.int32)
# Cosine and sine of -22.5, -11.25, 0, 11.25 and 22.5 degrees in 1/256; a machine's own could round differently
_COS = np.array([237, 251, 256, 251, 237], np.int32)
_SIN = np.array([-98, -50, 0, 50, 98], np.int32)

# Added to a seed, these separate the streams of labels and of photos
_LABEL_KEY, _PHOTO_KEY = 2**64, 2**65
_LONGER, _SHORTER = (450, 513), (300, 401)  # pixels of a photo's sides: the fewest, and one more than the most
_PHOTO_BYTES = 2**18  # random bytes for a photo: its grain takes most of them
# The strength of a photo's grain, chosen at random: at quality 90 it decides the size of the file
_PHOTO_GRAIN = np.array([8, 10, 12, 15, 18, 22, 26, 32], np.int16)

# The figure of each class reaches from about -64 to 64: x to the right, y down, d the distance squared
_FIGURES = (
    lambda x, y, d: d < 64**2,
    lambda x, y, d: (d < 64**2) & (d > 38**2),
    lambda x, y, d: np.maximum(abs(x), abs(y)) < 56,
    lambda x, y, d: (np.maximum(abs(x), abs(y)) < 60) & (np.maximum(abs(x), abs(y)) > 34),
    lambda x, y, d: (y < 44) & (7 * abs(x) < 4 * (y + 72)),
    lambda x, y, d: (np.maximum(abs(x), abs(y)) < 66) & (np.minimum(abs(x), abs(y)) < 18),
    lambda x, y, d: (np.maximum(abs(x), abs(y)) < 64) & (x & 31 < 18),
    lambda x, y, d: (np.maximum(abs(x), abs(y)) < 64) & ((x ^ y) & 32 == 0),
    lambda x, y, d: (abs(x) - 38) ** 2 + y**2 < 27**2,
    lambda x, y, d: (d < 64**2) & ((x - 30) ** 2 + y**2 > 50**2),
)


def draw(numbers: range, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw some images of an endless sequence; training and test images need different seeds, 0 or more.

    An image depends on `seed` and its number only, so a small set is the beginning of a larger one. Its pixels are
    integer arithmetic on the raw output of `numpy.random.Philox`, whose stream NumPy guarantees: the same on every
    machine. The bytes of a PNG file made of them follow Pillow and its zlib. 250 images at a time are fastest; 2,000
    were slower (they leave the cache), and need more memory.

    Returns
    -------
    images : ndarray of uint8, shape (images, 32, 32, 3)
    labels : ndarray of int64, shape (images,)
        Index in `CLASSES`. Images 0 to 9 show each class once, in random order; so do 10 to 19, and so on.
    """
    drawn = np.asarray(numbers)
    labels = _labels(seed, drawn)
    return _images(_Random(seed, drawn), labels.reshape(-1, 1, 1)), labels


def labels(count: int, seed: int) -> np.ndarray:
    """Return the labels of the first `count` images of `draw`: int64, shape (count,)."""
    return _labels(seed, np.arange(count))


def draw_photo(number: int, seed: int) -> tuple[np.ndarray, int]:
    """Draw photo `number` of an endless sequence, the same on every machine; a third of them stand upright.

    Returns
    -------
    image : ndarray of uint8, shape (height, width, 3)
        The longer side has 450 to 512 pixels, the shorter one 300 to 400.
    label : int
        Index in `CLASSES`. Photos 0 to 9 show each class once, in random order; so do 10 to 19, and so on.
    """
    numbers = np.array([number])
    labels = _labels(seed, numbers)
    return _photo(_Random(seed + _PHOTO_KEY, numbers, _PHOTO_BYTES), labels.reshape(-1, 1, 1)), int(labels[0])


class _Random:
    """Random bytes for images of consecutive numbers, used up from left to right."""

    def __init__(self, key: int, numbers: np.ndarray, size: int = _BYTES):
        philox = np.random.Philox(key=key, counter=int(numbers[0]) * size // 32)
        words = philox.random_raw(len(numbers) * size // 8)
        self._bytes = words.astype("<u8").view(np.uint8).reshape(len(numbers), size)

    def bytes(self, *shape: int) -> np.ndarray:
        """Whole numbers from 0 to 255: int32 of shape (images, *shape)."""
        size = int(np.prod(shape))
        taken, self._bytes = self._bytes[:, :size], self._bytes[:, size:]
        return taken.reshape(-1, *shape).astype(np.int32)

    def between(self, low: int, high: int) -> np.ndarray:
        """A whole number from `low` to `high` - 1 for each image: int32 of shape (images, 1, 1)."""
        high_byte, low_byte = np.split(self.bytes(2, 1), 2, axis=1)
        return low + ((high_byte * 256 + low_byte) * (high - low) >> 16)

    def clouds(self, *strengths: int, side: int = _SIDE) -> np.ndarray:
        """Sum of random grids, 4 cells wide, 8 cells, …, of these strengths, blurred: int32 of (images, side, side)."""
        field = np.zeros((1, 1, 1), np.int32)
        for number, strength in enumerate(strengths):
            field = _doubled(field) if number else field
            field = field + strength * (self.bytes(4 << number, 4 << number) - 128)
        while field.shape[1] < side:
            field = _doubled(field)
        return field


def _doubled(field: np.ndarray) -> np.ndarray:
    """Twice as many cells in a row and in a column, smoothed."""
    field = field.repeat(2, axis=1).repeat(2, axis=2)
    field[:, 1:-1] = (field[:, :-2] + 2 * field[:, 1:-1] + field[:, 2:]) >> 2
    field[:, :, 1:-1] = (field[:, :, :-2] + 2 * field[:, :, 1:-1] + field[:, :, 2:]) >> 2
    return field


def _labels(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Each class once in every ten images: the order that sorts ten random words."""
    first = numbers[0] // 10
    groups = int(numbers[-1] // 10 - first + 1)
    words = np.random.Philox(key=seed + _LABEL_KEY, counter=int(first) * 3).random_raw(groups * 12)  # 3 counts are 12
    return words.reshape(-1, 12)[:, :10].argsort(axis=1, kind="stable").reshape(-1)[numbers - 10 * first]


def _images(random: _Random, labels: np.ndarray) -> np.ndarray:
    """Draw one image for each label: uint8 of shape (images, 32, 32, 3)."""
    # A class prefers a colour, and another one for its background: something to learn in the first few steps
    colour = _COLOURS[np.where(random.between(0, 10) < 6, labels, random.between(0, 10))] + _colour_shift(random)
    behind = (labels + 5) % 10
    behind = _COLOURS[np.where(random.between(0, 10) < 5, behind, random.between(0, 10))] + _colour_shift(random)
    grey = random.between(60, 200)[..., None]
    behind = _mixed(grey, behind, random.between(30, 170))
    contrast = random.between(30, 220)

    image = np.where(_figures(random, labels)[..., None], _mixed(behind, colour, contrast), behind)
    for _ in range(3):
        spot = _mixed(behind, _COLOURS[random.between(0, 10)], contrast * 7 // 8)
        image = np.where(_spots(random)[..., None], spot, image)

    grain = (random.bytes(_SIDE, _SIDE) - 128) * _GRAIN[random.between(0, len(_GRAIN))]
    light = (random.clouds(64, 32, 12) + grain) >> 8
    tint = np.stack([random.clouds(64, 24) for _ in range(3)], axis=-1) >> 10
    return np.clip(image + light[..., None] + tint, 0, 255).astype(np.uint8)


def _photo(random: _Random, labels: np.ndarray) -> np.ndarray:
    """Draw one photo: uint8 of shape (height, width, 3)."""
    longer, shorter = int(random.between(*_LONGER).item()), int(random.between(*_SHORTER).item())
    height, width = (longer, shorter) if random.between(0, 3).item() == 0 else (shorter, longer)
    behind = _mixed(random.between(60, 200)[..., None], _COLOURS[random.between(0, 10)], random.between(60, 200))
    contrast = random.between(90, 230)
    colours = [behind, _mixed(behind, _COLOURS[labels] + _colour_shift(random), contrast)]

    # First choose each pixel's colour, then paint all at once: half the time of painting one by one
    chosen = _figures(random, labels, height, width)[0].astype(np.uint8)
    for _ in range(6):
        chosen[_spots(random, height, width)[0]] = len(colours)
        colours.append(_mixed(behind, _COLOURS[random.between(0, 10)], contrast))
    image = np.concatenate(colours).reshape(-1, 3).astype(np.int16).take(chosen, axis=0)  # a third of indexing's time

    tint = np.concatenate([random.clouds(64, 24, side=64) for _ in range(3)]) >> 10
    tint = tint.astype(np.int16).transpose(1, 2, 0).repeat(8, axis=0).repeat(8, axis=1)
    light = (random.clouds(64, 48, 32, 24, 16, 12, side=256) >> 8).astype(np.int16)
    light = _doubled(light[:, : height // 2 + 1, : width // 2 + 1])[0, :height, :width]
    grain = (random.bytes(height, width)[0] - 128).astype(np.int16) * _PHOTO_GRAIN[random.between(0, 8).item()] >> 8
    image += (light + grain)[..., None]
    image += tint[:height, :width]
    return image.clip(0, 255, out=image).astype(np.uint8)


def _figures(random: _Random, labels: np.ndarray, height: int = _SIDE, width: int = _SIDE) -> np.ndarray:
    """Where each image shows its figure: bool of shape (images, height, width)."""
    shorter = min(height, width)
    right, down = _offsets(random, 12 * shorter // 32, height, width)
    # from centre to edge the figure takes 0.4 to 0.175 of the shorter side
    tilt, zoom = random.between(0, len(_COS)), random.between(40, 92) * 32 * 256 // shorter
    cos, sin = _COS[tilt] * zoom, _SIN[tilt] * zoom
    x = right * cos + down * sin >> 20
    y = down * cos - right * sin >> 20
    inside = np.empty(x.shape, bool)
    for label in np.unique(labels):
        (of_class,) = np.nonzero(labels.reshape(-1) == label)
        x_of, y_of = x[of_class], y[of_class]
        inside[of_class] = _FIGURES[label](x_of, y_of, x_of**2 + y_of**2)
    return inside


def _spots(random: _Random, height: int = _SIDE, width: int = _SIDE) -> np.ndarray:
    """Where each image has a small disc: bool of shape (images, height, width)."""
    shorter = min(height, width)
    right, down = _offsets(random, 31 * shorter // 32, height, width)
    return right**2 + down**2 <= (16 * shorter**2 - 1) // random.between(250, 900)  # the radius is 1/8 to 1/15 of it


def _offsets(random: _Random, reach: int, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances to the right and down from a random point, in half pixels."""
    right = 2 * np.arange(width, dtype=np.int32) - (width - 1) - random.between(-reach, reach + 1)
    down = 2 * np.arange(height, dtype=np.int32)[:, None] - (height - 1) - random.between(-reach, reach + 1)
    return right, down


def _colour_shift(random: _Random) -> np.ndarray:
    return np.stack([random.between(-34, 35) for _ in range(3)], axis=-1)


def _mixed(colour: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """`colour` with `share`/256 of the way gone to `other`."""
    return colour + ((other - colour) * share[..., None] >> 8)
