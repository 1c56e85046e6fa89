"""A pack in which anything was changed yields an error of ours, or the exact images. Never anything else.

The damaged packs are read in a process of their own, so that it is seen if a library crashes or hangs on one.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import packs

from helpers.loading import formats

pytestmark = pytest.mark.slow

CHANGES, TRUNCATIONS = 200, 50

# Images in several shards, row groups and blocks, of which some are larger than half a page and some smaller
SHAPES = {
    "fixed": [(3, 40, 40)] * 36,
    "small": [(3, 5, 5)] * 20,
    "varying": [(3, 1 + number * 3, 30) for number in range(20)],
}
CASES = [(kind, "fixed", False) for kind in packs.KINDS]
CASES += [(kind, "small", False) for kind in ("lmdb raw", "lmdb png", "hdf5")]
CASES += [(kind, "varying", True) for kind in ("npy", "lmdb raw", "hdf5", "tar", "zip", "tfrecord", "parquet")]


def samples(shape: str, pairs: bool):
    """Images and labels of a case."""
    images = packs.images(*SHAPES[shape])
    return images, packs.images(*SHAPES[shape], seed=1) if pairs else list(range(len(images)))


def damages(folder: Path):
    """Yield what to do to a copy of `folder`: the file, its changed content, and a description."""
    choose = random.Random(5)
    files = sorted(folder.iterdir())
    for number in range(CHANGES + TRUNCATIONS):
        file = choose.choice(files)
        content = bytearray(file.read_bytes())
        place = choose.randrange(len(content))
        if number < CHANGES:
            content[place] ^= choose.randrange(1, 256)
            yield file.name, bytes(content), f"byte {place} of {file.name} changed"
        else:
            yield file.name, bytes(content[:place]), f"{file.name} cut off after {place} bytes"


def outcome(dataset_class, folder: Path, damaged: str, images, labels) -> str:
    """Read every sample of a pack, alone and in batches; say what was wrong, or nothing."""
    dataset = None
    for index in range(len(images)):
        for way in (lambda: dataset[index], lambda: dataset.__getitems__([index, 0])[0]):  # noqa: B023 (called at once)
            try:
                dataset = dataset or dataset_class(folder)
                if not packs.same(way(), images[index], labels[index]):
                    return f"item {index} is wrong"
            except formats.DamagedPack as error:
                if damaged not in str(error):
                    return f"an error that does not name the file: {error}"
            except Exception as error:
                return f"not our error: {error!r}"
    return ""


def read_damaged_packs(kind: str, shape: str, pairs: bool, folder: Path) -> None:
    """Damage copies of a pack and read them; print each damage before it is read, and what was wrong."""
    images, labels = samples(shape, pairs)
    dataset_class = type(packs.pack(kind, images, labels, folder / "pack"))
    for file, content, what in damages(folder / "pack"):
        print(what, end=": ", flush=True)
        copy = folder / "copy"
        shutil.copytree(folder / "pack", copy)
        (copy / file).write_bytes(content)
        print(outcome(dataset_class, copy, file, images, labels) or "fine", flush=True)
        shutil.rmtree(copy)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def test_a_damaged_pack_yields_an_error_that_names_the_file_or_the_exact_images(tmp_path, case):
    code = "import pathlib, sys; import test_formats_damage as test; "
    code += f"test.read_damaged_packs({case[0]!r}, {case[1]!r}, {case[2]!r}, pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.run(command, env=packs.environment(), capture_output=True, text=True, timeout=300)
    lines = process.stdout.splitlines()
    assert process.returncode == 0, (lines[-1], process.returncode, process.stderr)
    assert [line for line in lines if not line.endswith(": fine")] == []
    assert len(lines) == CHANGES + TRUNCATIONS


@pytest.fixture(params=packs.KINDS)
def packed(request, tmp_path):
    images, labels = samples("fixed", False)
    dataset = packs.pack(request.param, images, labels, tmp_path / "pack")
    return dataset, tmp_path / "pack", images, labels


def test_a_changed_pixel_names_the_file_and_the_item(packed):
    dataset, folder, images, _ = packed
    for file in folder.iterdir():
        content = file.read_bytes()
        place = content.find(images[33].tobytes())
        if place >= 0:
            file.write_bytes(content[: place + 5] + bytes([content[place + 5] ^ 1]) + content[place + 6 :])
            with pytest.raises(formats.DamagedPack, match=rf"{file.name}, items? .*checksum"):
                dataset[33]
            with pytest.raises(formats.DamagedPack, match=rf"{file.name}, items? .*checksum"):
                dataset.__getitems__([1, 33, 2])
            return
    assert "lmdb" in str(type(dataset)), "only where images are encoded, or split, are their pixels not found"


def test_a_missing_file_is_named(packed):
    dataset, folder, _, _ = packed
    for file in sorted(folder.iterdir()):
        file.rename(folder.parent / "elsewhere")
        with pytest.raises(formats.DamagedPack, match=file.name):
            type(dataset)(folder)[0]
        (folder.parent / "elsewhere").rename(file)
    assert type(dataset)(folder)[1][1] == 1
