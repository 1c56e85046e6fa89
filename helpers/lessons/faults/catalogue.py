"""Faults that real training scripts have: what people write, and what it should be. None changes what is learned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
"""The script without any fault."""

EPOCH_STEPS = 8
"""Batches in an epoch of the script."""

# How many of a kind a script has. One that only a GPU can feel, so that the other five show without one.
DRAWN = {"loading": 3, "loop": 2, "GPU": 1}


class WrongGroups(ValueError):
    """A class cannot have so many groups."""


@dataclass(frozen=True)
class Fault:
    """Something that costs time and changes nothing else.

    Attributes
    ----------
    name : str
        What it is, in a few words.
    place : str
        Where its time goes, one of `DRAWN`: to ``"loading"``, to the rest of the ``"loop"``, or, on a ``"GPU"`` alone,
        to the host or the GPU that wait for each other.
    why : str
        What it costs, and what to do instead, in a sentence.
    notebook : str
        The notebook that explains it, without ``.ipynb``.
    finding : str or None
        What `diagnosis.diagnose` calls it, at least with a GPU; None if it cannot see it.
    edits : tuple of (str, str)
        Pieces of `SCRIPT`, as they should be and as people write them. Each is in the script exactly once.
    """

    name: str
    place: str
    why: str
    notebook: str
    finding: str | None
    edits: tuple[tuple[str, str], ...]

    def fits_beside(self, other: Fault) -> bool:
        """Whether a script can have both: they change different lines."""
        return not self._lines() & other._lines()

    def _lines(self) -> set[int]:
        script, lines = SCRIPT.read_text(encoding="utf-8"), set()
        for right, _ in self.edits:
            start = script.index(right)
            first = script.count("\n", 0, start)
            lines.update(range(first, first + right.count("\n")))
        return lines


FAULTS = (
    Fault(
        "no workers", "loading",
        "The loop makes each batch itself and trains on none meanwhile; workers load in the background.",
        "03-more-workers", "loading in the loop itself",
        (
            ("import os\n", ""),
            (
                "        num_workers=min(4, os.cpu_count()),\n        persistent_workers=True,\n",
                "        num_workers=0,\n",
            ),
        ),
    ),
    Fault(
        "workers restarted every epoch", "loading",
        "Epochs are short here, and each begins with new workers and empty queues; persistent ones go on.",
        "03-more-workers", "workers restarted every epoch",
        (("        persistent_workers=True,\n", ""),),
    ),
    Fault(
        "decoded twice", "loading",
        "To know its size, the file is opened and decoded, and then opened and decoded once more; once is enough.",
        "01-first-profile", "decoding at every read",
        (
            (
                '        image = Image.open(path).convert("RGB")\n        if image.size != (32, 32):\n'
                '            raise ValueError(f"{path}: expected 32 × 32 pixels, found {image.size}")\n',
                '        size = Image.open(path).convert("RGB").size\n        if size != (32, 32):\n'
                '            raise ValueError(f"{path}: expected 32 × 32 pixels, found {size}")\n'
                '        image = Image.open(path).convert("RGB")\n',
            ),
        ),
    ),
    Fault(
        "enlarged and shrunk", "loading",
        "Left over from another network, which wanted 224 × 224 pixels: the image is as before, the time is gone.",
        "05-preprocess-ahead", "resizing at every read",
        (
            (
                "        return TO_TENSOR(image), label\n",
                "        image = image.resize((224, 224), Image.NEAREST).resize((32, 32), Image.NEAREST)\n"
                "        return TO_TENSOR(image), label\n",
            ),
        ),
    ),
    Fault(
        "normalized image by image", "loading",
        "A processor core makes floats of each image; the network can, of the whole batch at once on its device.",
        "04-normalize-on-device", "transforms of each image",
        (
            (
                "TO_TENSOR = transforms.PILToTensor()\n",
                "TO_TENSOR = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])\n",
            ),
            (
                '        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))\n'
                '        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))\n',
                "",
            ),
            ("        images = (images / 255 - self.mean) / self.std\n", ""),
        ),
    ),
    Fault(
        "pixels copied row by row", "loading",
        "A loop in Python over the rows of an image; one call of a library does the same.",
        "04-normalize-on-device", "the dataset's own work",
        (
            ("from pathlib import Path\n\n", "from pathlib import Path\n\nimport numpy as np\n"),
            ("from torchvision import transforms\n", ""),
            ("TO_TENSOR = transforms.PILToTensor()\n", ""),
            (
                "        return TO_TENSOR(image), label\n",
                "        pixels, rows = torch.empty(3, 32, 32, dtype=torch.uint8), np.array(image)\n"
                "        for y in range(32):\n"
                "            pixels[:, y] = torch.from_numpy(rows[y]).T\n"
                "        return pixels, label\n",
            ),
        ),
    ),
    Fault(
        "batch made of lists", "loading",
        "Each pixel becomes a number of Python, then a pixel again; PyTorch's own function copies whole images.",
        "06-packed-formats", "collating item by item",
        (
            (
                "def make_loader():\n",
                "def collate(items):\n"
                "    images = [image.tolist() for image, label in items]\n"
                "    labels = [label for image, label in items]\n"
                "    return torch.tensor(images, dtype=items[0][0].dtype), torch.tensor(labels)\n\n\n"
                "def make_loader():\n",
            ),
            ("        batch_size=BATCH,\n", "        batch_size=BATCH,\n        collate_fn=collate,\n"),
        ),
    ),
    Fault(
        "rows taken from a data frame", "loading",
        "pandas makes a new object of each row that is asked for; a list or an array gives what is there.",
        "03-more-workers", "the dataset's own work",
        (
            ("import csv\n", ""),
            ("import torch\n", "import pandas as pd\nimport torch\n"),
            (
                '        with open(folder / "labels.csv", newline="") as file:\n'
                "            rows = list(csv.DictReader(file))[:count]\n"
                '        self.paths = [folder / row["file"] for row in rows]\n'
                '        self.labels = [int(row["label"]) for row in rows]\n',
                '        self.table = pd.read_csv(folder / "labels.csv", nrows=count)\n',
            ),
            ("        return len(self.paths)\n", "        return len(self.table)\n"),
            (
                "        path, label = self.paths[index], self.labels[index]\n",
                "        row = self.table.iloc[index]\n"
                '        path, label = DATA / row["file"], int(row["label"])\n',
            ),
        ),
    ),
    Fault(
        "checkpoint in every step", "loop",
        "All weights are written to the disk after each batch; once an epoch suffices.",
        "14-your-own-code", None,
        (
            (
                "        torch.save(model.state_dict(), CHECKPOINT)\n",
                "            torch.save(model.state_dict(), CHECKPOINT)\n",
            ),
        ),
    ),
    Fault(
        "anomaly detection left on", "loop",
        "It notes where each operator was called, and searches each gradient for NaN; switch it on for a search only.",
        "11-fewer-launches", None,
        (
            (
                "    logits = model(images)\n    loss = nn.functional.cross_entropy(logits, labels)\n"
                "    loss.backward()\n",
                "    with torch.autograd.detect_anomaly():\n        logits = model(images)\n"
                "        loss = nn.functional.cross_entropy(logits, labels)\n        loss.backward()\n",
            ),
        ),
    ),
    Fault(
        "profiler left on", "loop",
        "With stacks it notes every call of a Python function; profile some steps, and then stop.",
        "01-first-profile", None,
        (
            (
                "    model, optimizer = make_model()\n",
                "    model, optimizer = make_model()\n"
                "    profiler = torch.profiler.profile(record_shapes=True, with_stack=True)\n    profiler.start()\n",
            ),
            ('\n\nif __name__ == "__main__":\n', '    profiler.stop()\n\n\nif __name__ == "__main__":\n'),
        ),
    ),
    Fault(
        "histograms of all weights in every step", "loop",
        "All weights are copied to the host and counted after each batch; once an epoch suffices.",
        "14-your-own-code", None,
        (
            ("    for epoch in range(epochs):\n", "    histograms = []\n    for epoch in range(epochs):\n"),
            (
                "            right += correct\n",
                "            right += correct\n"
                "            weights = [weight.detach().cpu() for weight in model.parameters()]\n"
                "            histograms.append([weight.histogram(50) for weight in weights])\n",
            ),
        ),
    ),
    Fault(
        "accuracy counted image by image", "loop",
        "Some operators for each class of each image, and as often a wait for the GPU; compare whole tensors, and sum.",
        "08-resnet50-baseline", "a synchronization in every step",
        (
            (
                "    correct = (logits.argmax(1) == labels).sum()\n",
                "    correct = 0\n    for scores, label in zip(logits, labels):\n        best = 0\n"
                "        for index in range(len(scores)):\n            if scores[index] > scores[best]:\n"
                "                best = index\n        if best == label:\n            correct += 1\n",
            ),
        ),
    ),
    Fault(
        "loss printed in every step", "GPU",
        "To read the loss, the host waits for the GPU, and then the GPU for the host; read it now and then.",
        "08-resnet50-baseline", "a synchronization in every step",
        (
            (
                "    return loss.detach(), correct\n",
                '    print(f"loss {loss.item():.3f}")\n    return loss.detach(), correct\n',
            ),
        ),
    ),
    Fault(
        "copies from pageable memory", "GPU",
        "The host waits until each copy has been made; from pinned memory the copy runs beside the computation.",
        "03-more-workers", "pageable copies",
        (
            ("        pin_memory=torch.cuda.is_available(),\n", ""),
            (
                "    images = images.to(device, non_blocking=True)\n"
                "    labels = labels.to(device, non_blocking=True)\n",
                "    images = images.to(device)\n    labels = labels.to(device)\n",
            ),
        ),
    ),
    Fault(
        "optimizer weight by weight", "GPU",
        "A kernel or more for each tensor of weights, where one takes them all; PyTorch's own choice is faster.",
        "11-fewer-launches", "launch-bound steps",
        (
            (
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n",
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)\n",
            ),
            ("    optimizer.zero_grad()\n", "    optimizer.zero_grad(set_to_none=False)\n"),
        ),
    ),
    Fault(
        "gradients' norms read one by one", "GPU",
        "The host waits for the GPU once for each tensor of weights; sum on the GPU, and read now and then.",
        "08-resnet50-baseline", "a synchronization in every step",
        (
            (
                "    optimizer.step()\n",
                "    norm = sum(weight.grad.norm().item() ** 2 for weight in model.parameters()) ** 0.5\n"
                "    if norm > 100:\n"
                '        print(f"large gradients: {norm:.0f}")\n'
                "    optimizer.step()\n",
            ),
        ),
    ),
)  # fmt: skip


def draw(seed: int) -> tuple[Fault, ...]:
    """Return the faults that a seed stands for, in the order of the catalogue: the same on every machine."""
    shuffled = sorted(FAULTS, key=lambda fault: _place_in_line(fault, seed))
    drawn = []
    for place, count in DRAWN.items():
        for fault in shuffled:
            wanted = fault.place == place and [each.place for each in drawn].count(place) < count
            if wanted and all(fault.fits_beside(other) for other in drawn):
                drawn.append(fault)
    return tuple(sorted(drawn, key=FAULTS.index))


def seeds_of_groups(groups: int, seed: int) -> list[int]:
    """Return a seed for each group of a class, so that no two groups have the same six faults.

    Parameters
    ----------
    groups : int
        1 to 99, which is fewer than there are sets of six that fit beside each other (1,560).
    seed : int
        Of the class. The groups' are 100 times it and a number, which is their own but where faults would repeat.

    Raises
    ------
    WrongGroups
        If there are fewer groups or more.
    """
    if not 1 <= groups <= 99:
        raise WrongGroups(f"Expected 1 to 99 groups, found {groups}: name another number after --groups.")
    seeds, each = {}, 100 * seed
    while len(seeds) < groups:
        each += 1
        seeds.setdefault(draw(each), each)
    return list(seeds.values())


def text(faults: Sequence[Fault], images: Path) -> str:
    """Return the script with these faults.

    Parameters
    ----------
    faults : sequence of Fault
        None for the script as it should be.
    images : Path
        Folder of the training images, as `cifar10.Prepared.train` names it.
    """
    script = SCRIPT.read_text(encoding="utf-8").replace('"data/cifar10/train"', repr(str(images)))
    for fault in faults:
        for right, wrong in fault.edits:
            script = script.replace(right, wrong)
    return script


def _place_in_line(fault: Fault, seed: int) -> bytes:
    """Order the faults anew for each seed: by a hash, since what Python's random draws may change with its version.

    It depends on the fault's number in the catalogue, not on its words, which may change. So new faults go to the end.
    """
    return hashlib.sha256(f"{seed} {FAULTS.index(fault)}".encode()).digest()
