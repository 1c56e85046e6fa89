"""Each check answers the placeholder, the solution, and typical wrong answers: the solution with a mistake."""

import re
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader

from helpers import config
from helpers.lessons import checks

NAMES = {  # what the cells have imported
    "DataLoader": DataLoader, "Image": Image, "ImageOps": ImageOps, "cross_entropy": nn.functional.cross_entropy,
    "nn": nn, "np": np, "time": time, "torch": torch,
}  # fmt: skip
LESSONS = {  # the check of each notebook, and what the reader writes
    "00": ("items_per_second", "items_per_second"),
    "01": ("train_step", "train_step"),
    "02": ("two_clocks", "two_clocks"),
    "03": ("new_loader", "new_loader"),
    "04": ("normalize", "Normalize"),
    "05": ("resize", "resize"),
    "06": ("packed_images", "PackedImages"),
    "08": ("mean_loss", "mean_loss"),
    "09": ("channels_last_step", "train_step"),
    "10": ("mixed_step", "mixed_step"),
    "11": ("three_in_one", "three_in_one"),
}
KEPT = '        if self.images is None:\n            self.images = np.load(self.path, mmap_mode="r")\n'
WITHOUT_STATE = '    def __getstate__(self):\n        return self.__dict__ | {"images": None}\n\n'
# What is wrong, where the solution is changed, and what the answer must say.
WRONG = {
    "00": [
        ("seconds instead", ("return count / (", "return ("), "expected .* items/s, found 0"),
        ("one item", ("range(count)", "range(1)"), "expected 50 items to be read, found 1 item"),
        ("seconds an item", ("return count / (", "return 1 / count * ("), "50 items took"),
    ],
    "01": [
        ("gradients kept", ("    optimizer.zero_grad()\n", ""), "after step 2 a weight differs"),
        ("the value is read", ("loss.detach()", "loss.item()"), "expected the loss as a tensor"),
        ("the graph is kept", ("loss.detach()", "loss"), "holds the graph"),
        ("softmax twice", ("model(images)", "model(images).softmax(1)"), "expected a loss of .* in step 1"),
        ("no step", ("    optimizer.step()\n", ""), "after step 1 a weight differs"),
    ],
    "02": [
        ("the first batch counts", ("    batch = next(batches)\n    step(*batch)\n    start = time.perf_counter()\n",
            "    start = time.perf_counter()\n    batch = next(batches)\n    step(*batch)\n"), "for loading alone"),
        ("the first step counts", ("    step(*batch)\n    start", "    start"), "for compute alone"),
        ("steps in between", ("        next(batches)\n", "        step(*next(batches))\n"), "for loading alone"),
        ("milliseconds", ("return (loaded - start) / 20", "return (loaded - start) * 50"), "for loading alone"),
    ],
    "03": [
        ("one worker", ("num_workers=2", "num_workers=1"), "num_workers: found 1"),
        ("in one order", ("shuffle=True", "shuffle=False"), "same order"),
        ("the rest is kept", ("drop_last=True", "drop_last=False"), r"sizes \[44, 128\]"),
    ],
    "04": [
        ("parameters", ('self.register_buffer("mean", ', "self.mean = nn.Parameter("), "would be trained"),
        ("attributes", ('self.register_buffer("mean", ', "self.mean = ("), "not saved"),
        ("no 255", ('"mean", 255 * ', '"mean", '), "a number differs"),
        ("no channels", ("torch.tensor(mean).view(-1, 1, 1)", "torch.tensor(mean)"), r"RuntimeError: .*\(line \d of"),
    ],
    "05": [
        ("squashed", ("(round(photo.width * factor), round(photo.height * factor))", "(side, side)"), "a wide photo"),
        ("the longer side", ("min(photo.size)", "max(photo.size)"), "640 × 400: expected .160, 100. pixels"),
        ("grey stays grey", ('.convert("RGB")', ".copy()"), "expected the mode RGB, found L"),
        ("lying", ("ImageOps.exif_transpose(photo)", "photo"), "held upright"),
    ],
    "06": [
        ("opened at once", (", None\n", ", np.load(path, mmap_mode='r')\n"), "when the dataset is made"),
        ("pickled whole", (WITHOUT_STATE, ""), "9 MB on its way"),
        ("sorted", (KEPT, KEPT + "        indices = sorted(indices)\n"), "not those asked for, in order"),
        ("a list of pairs", ("return torch.from_numpy(self.images[indices]), self.labels[indices]",
            "return [(torch.tensor(self.images[each]), self.labels[each]) for each in indices]"),
            "found list of tuple"),
    ],
    "08": [
        ("reads each", ("step(images, labels) for", "step(images, labels).cpu() for"), r"in the loop \(cpu"),
        ("a number each", ("[step(images, labels) for", "[torch.tensor(float(step(images, labels))) for"),
            "in the loop"),
        ("prints", ("    return", '    print(f"{losses[0]:.2f} {losses[1]:.2f}")\n    return'), "read 3 times"),
        ("a tensor", (".mean().item()", ".mean()"), "expected the mean as a float"),
    ],
    "09": [
        ("only the images", ("    model.to(memory_format=torch.channels_last)", "    pass"), "expected the weights of"),
        ("only the weights", ("    images = images.to(memory_format=torch.channels_last)\n", ""),
            "expected the images in"),
        ("not kept", ("    images = images.to", "    images.to"), "expected the images in"),
        ("permuted", ("model(images)", "model(images.permute(0, 2, 3, 1))"), "RuntimeError"),
    ],
    "10": [
        ("clipped too early", ("    scaler.unscale_(optimizer)\n", ""), "divided by the factor before"),
        ("in float32", ("torch.bfloat16", "torch.bfloat16, enabled=False"), "to give bfloat16, found torch.float32"),
        ("no update", ("    scaler.update()", "    pass"), "RuntimeError: unscale_"),
        ("not clipped", ("    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", ""), "clipped to a norm"),
    ],
    "11": [
        ("three calls", ("return result.split([layer.out_features for layer in layers], dim=-1)",
            "return [layer(x) for layer in layers]"), "one product .* found 4"),
        ("cut alike", ("split([layer.out_features for layer in layers], dim=-1)", "chunk(3, dim=-1)"),
            r"expected \(32, 16\), found \(32, 19\)"),
        ("no bias", ("(x, weight, bias)", "(x, weight)"), "result 1 differs"),
        ("copies of the weights", ("layer.weight for", "layer.weight.detach() for"), "would not learn"),
    ],
}  # fmt: skip
CASES = [(number, *case) for number, cases in WRONG.items() for case in cases]
IDS = [f"{number}, {title}" for number, title, *_ in CASES]


def code_of(number, tag):
    """Return what the reader writes: the placeholder, or the solution without the line that checks it."""
    (path,) = (config.PROJECT / "notebooks").glob(f"{number}-*.ipynb")
    cells = [cell for cell in nbformat.read(path, 4).cells if tag in cell.metadata.get("tags", [])]
    return re.sub(r"^%%writefile.*\n", "", cells[0].source).partition("\n\n\nassert checks.")[0]


def checked(number, code, folder):
    """Give what the code defines, or a file of it, to the notebook's check."""
    check, name = LESSONS[number]
    path = folder / f"written_{number}.py"
    path.write_text(code, encoding="utf-8")
    if number == "06":
        return checks.packed_images(path)
    scope = dict(NAMES)
    exec(compile(code, path, "exec"), scope)
    return getattr(checks, check)(scope[name])


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    """The folder from which a spawned worker imports, as in the notebook."""
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("written_06", None)


def test_each_check_has_three_wrong_answers():
    assert WRONG.keys() == LESSONS.keys()
    assert all(len(cases) >= 3 for cases in WRONG.values())


@pytest.mark.parametrize(("number", "title", "change", "said"), CASES, ids=IDS)
def test_a_wrong_answer_is_answered_with_what_was_found(number, title, change, said, tmp_path, capsys):
    right = code_of(number, "solution")
    assert right.count(change[0]) == 1
    assert checked(number, right.replace(*change), tmp_path) is False
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("Not yet: ")
    assert re.search(said, printed), printed


@pytest.mark.processes
@pytest.mark.parametrize("number", LESSONS)
def test_the_solution_of_the_notebook_is_right_and_its_placeholder_none(number, tmp_path, capsys):
    assert checked(number, code_of(number, "exercise"), tmp_path) is False
    assert capsys.readouterr().out.startswith("Nothing to check yet: ")
    (tmp_path / "right").mkdir()
    sys.path.insert(0, str(tmp_path / "right"))
    assert checked(number, code_of(number, "solution"), tmp_path / "right") is True
    assert capsys.readouterr().out.startswith("Right: ")


@pytest.mark.parametrize(("text", "said"), [
    (None, "Nothing to check yet: there is no file"),
    ("class PackedImages(Dataset)", "Not yet: no PackedImages can be imported from written_06.py: SyntaxError"),
    ("class Packed: ...", "Not yet: no PackedImages can be imported from written_06.py: AttributeError"),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_answered(text, said, tmp_path, capsys):
    path = Path(tmp_path, "written_06.py")
    if text:
        path.write_text(text, encoding="utf-8")
    assert checks.packed_images(path) is False
    assert capsys.readouterr().out.startswith(said)


def test_an_error_names_the_line_of_the_cell(tmp_path, capsys):
    code = "def mean_loss(loader, step):\n    for batch in loader:\n        step(batch)"
    assert checked("08", code, tmp_path) is False
    assert "TypeError" in (said := capsys.readouterr().out) and "(line 3 of your cell)" in said
