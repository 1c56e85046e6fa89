"""An exercise: an ordinary-looking training script with six faults, drawn by a seed from a catalogue; and its grading.

The script is used through four of its functions: ``make_loader()``, ``make_model()``, which returns the model and its
optimizer, ``train_step(model, optimizer, images, labels)``, which returns the loss, alone or first, and
``main(epochs)``, which calls the others.

`running` times scripts in interleaved runs, and `grading` says whether a fixed script trains the same, and which
faults are gone.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from helpers.lessons.faults import catalogue
from helpers.lessons.faults.catalogue import Fault
from stepscope.base import staging

# How many faults of each place a script has. Only one needs a GPU to show; the other five show without one.
DRAWN = {"loading": 3, "loop": 2, "GPU": 1}


def draw(seed: int) -> tuple[Fault, ...]:
    """Return the faults that a seed stands for, in the order of the catalogue: the same on every machine."""
    # By a hash of the number, because Python's random numbers and the words of a fault may change
    numbers = range(len(catalogue.FAULTS))
    in_line = sorted(numbers, key=lambda number: hashlib.sha256(f"{seed} {number}".encode()).digest())
    drawn: list[Fault] = []
    for place, count in DRAWN.items():
        last = len(drawn) + count
        for number in in_line:
            fault = catalogue.FAULTS[number]
            if len(drawn) < last and fault.place == place and all(map(fault.fits_beside, drawn)):
                drawn.append(fault)
    return tuple(sorted(drawn, key=catalogue.FAULTS.index))


def text(faults: Sequence[Fault], images: Path) -> str:
    """Return the script with these faults, and with a folder of images as `cifar10.Prepared.train` names it."""
    script = catalogue.SCRIPT.read_text(encoding="utf-8").replace('"data/cifar10/train"', repr(str(images)))
    for fault in faults:
        script = fault.put_into(script)
    return script


def write(path: Path, faults: Sequence[Fault], images: Path) -> Path:
    """Write a script with these faults, but keep one that has been edited; print which, and return its path.

    `faults` and `images` are as for `text`.
    """
    path, script = Path(path).resolve(), text(faults, images).encode()
    if path.exists() and staging.read(path) != script:
        print(f"{path} differs from the script that was drawn, and is kept. Delete it to begin anew.")
        return path
    staging.write(path, script)
    print(f"Wrote {path}.")
    return path


def write_for_groups(folder: Path, groups: int, seed: int, images: Path) -> dict[Path, int]:
    """Write a script for each group of a class; print which, and return their seeds.

    No two groups have the same six faults; there are 1,560 such sets. A group's seed is 100 times the class's seed plus
    the group's number, or a higher number after repeated faults. A script is named after its group and seed, such as
    ``train-group-1-seed-701.py``; a missing folder is created.
    """
    scripts: dict[tuple[Fault, ...], int] = {}
    candidate = 100 * seed
    while len(scripts) < groups:
        candidate += 1
        scripts.setdefault(draw(candidate), candidate)
    return {
        write(Path(folder, f"train-group-{number}-seed-{own}.py"), faults, images): own
        for number, (faults, own) in enumerate(scripts.items(), 1)
    }


def keep(path: Path, name: str) -> dict[str, Path]:
    """Copy a script as it is now into the folder ``steps`` beside it, and return all copies by name, oldest first.

    The `name` says what has been fixed. An earlier copy of that name is replaced; characters that file names cannot
    have are left out.
    """
    steps, name = path.parent / "steps", " ".join(re.sub(r"[^\w ,()-]", " ", name).split())
    if not name:
        raise ValueError("Expected a name for what you have fixed, such as 'more workers', and found none.")
    kept = {copy.parent.name.split(" ", 1)[1]: copy for copy in sorted(steps.glob(f"[0-9][0-9] */{path.name}"))}
    copy = kept.get(name) or steps / f"{len(kept):02} {name}" / path.name
    staging.write(copy, staging.read(path))
    return kept | {name: copy}
