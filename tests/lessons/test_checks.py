"""Each check answers the placeholder, the solution, and typical wrong answers: the solution with a mistake."""

import re
import sys
import time

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader

from helpers import config
from helpers.lessons import checks
from helpers.lessons.checks import answering

NAMES = {  # what the cells have imported
    "DataLoader": DataLoader, "Image": Image, "ImageOps": ImageOps, "cross_entropy": nn.functional.cross_entropy,
    "nn": nn, "np": np, "time": time, "torch": torch,
}  # fmt: skip
KEPT = '        if self.images is None:\n            self.images = np.load(self.path, mmap_mode="r")\n'
WITHOUT_STATE = '    def __getstate__(self):\n        return self.__dict__ | {"images": None}\n\n'
SUMS = "count += pixels.numel() / 3  # of one channel\n        total += pixels.sum(dim=(0, 2, 3))\n"
MEANS = "count += 1\n        total += pixels.mean(dim=(0, 2, 3))\n"
LAST = "\n    if started is not None:\n        yield finish_copy(started)"
AHEAD = "        if started is not None:\n            yield finish_copy(started)\n        started = following" + LAST
ONE_BY_ONE = """return tuple(torch.stack([take(images[n:n + 1], scale * top[n:n + 1], scale * left[n:n + 1],
        scale * size)[0] for n in range(len(low))]) for images, scale in ((low, 1), (high, scale)))"""
START, EMPTY = "self.started.append(self.all_reduce(flat))", "self.bucket = []"
FULL, WAIT = "self.start(at_least=self.bucket_bytes)", "while self.started:\n            self.started.pop().wait()"


# What is wrong, where the solution is changed, and what the answer must say.
WRONG = {
    "00": [
        ("seconds instead", ("return count / (", "return ("), "found 0"),
        ("one item", ("range(count)", "range(1)"), "50 items .* found 1 item"),
        ("the same item", ("dataset[index]", "dataset[0]"), "50 different items, found 1 "),
    ],
    "01": [
        ("in percent", ("return waiting", "return 100 * waiting"), "0.625, found 62.5"),
        ("the GPU's marks, too", ('event.get("cat") == "user_annotation" and ', ""), "trace of a GPU.*found 0.12"),
    ],
    "02": [
        ("the start counts", ("sum(waits[1:]), sum(steps[1:])", "sum(waits), sum(steps)"), "0.3846, found 0.7353"),
        ("another clock", ("clock()", "time.perf_counter()"), "clock that was given"),
    ],
    "03": [
        ("one after the other", (
            "for _ in range(5):\n        for workers in random.sample(candidates, len(candidates)):",
            "for workers in candidates:\n        for _ in range(5):"), "found the order 0, 1, 2, 4"),
        ("the start counts", ("range(1 + 2 * workers)", "range(0)"), "a quiet machine: expected 2, found 0"),
        ("what was ready counts", ("range(1 + 2 * workers)", "range(1)"), "a quiet machine: expected 2, found 4"),
    ],
    "04": [
        ("no 255", ("images.double() / 255", "images.double()"), "mean: expected 0"),
        ("mean of the means", (SUMS, MEANS), "the last batch has fewer"),
        ("all at once", ("in loader:", "in list(loader):"), "3 of 3 batches in memory"),
    ],
    "05": [
        ("squashed", ("(round(photo.width * factor), round(photo.height * factor))", "(side, side)"), "a wide photo"),
        ("grey stays grey", ('.convert("RGB")', ".copy()"), "expected the mode RGB, found L"),
        ("lying", ("ImageOps.exif_transpose(photo)", "photo"), "held upright"),
    ],
    "06": [
        ("opened at once", (", None\n", ", np.load(path, mmap_mode='r')\n"), "when the dataset is made"),
        ("pickled whole", (WITHOUT_STATE, ""), "found 9.2. MB"),
        ("sorted", (KEPT, KEPT + "        indices = sorted(indices)\n"), "in this order, found others"),
    ],
    "07": [
        ("one draw", ("top, left = torch.randint(places, (2, len(low)), device=low.device)",
            "top, left = torch.randint(places, (2, 1)).expand(2, len(low))"), "80 of 2,000 crops at each of 5 × 5"),
        ("another place in high", ("scale * top, scale * left", "top, left"), "crops of high, where high is 2 times"),
        ("image by image", (
            "return take(low, top, left, size), take(high, scale * top, scale * left, scale * size)", ONE_BY_ONE),
            "at most 200, found .*,... operators for 2,000 pairs"),
    ],
    "08": [
        ("not ahead", (AHEAD, "        yield finish_copy(following)"), "batch 0 .* copy of one batch .* found 0"),
        ("the last one is lost", (LAST, ""), "6 batches from a loader of 6, found 5"),
        ("all at once", ("for batch in loader:\n        following = start_copy(batch)",
            "for following in [start_copy(batch) for batch in loader]:"), "copy of one batch .* found 5"),
    ],
    "09": [
        ("not seen as before", (".permute(0, 3, 1, 2)", ""), r"the shape \(2, 6, 4, 5\), found \(2, 4, 5, 6\)"),
        ("contiguous", ("permute(0, 3, 1, 2)", "permute(0, 3, 1, 2).contiguous()"), r"found \(120, 20, 5, 1\)"),
        ("there and back", ("images.permute", "images.contiguous().permute"), "no copy .* found aten::clone"),
    ],
    "10": [
        ("clipped too early", ("    scaler.unscale_(optimizer)\n", ""), "clipped to 0.1: .* the whole batch"),
        ("sum of the means", (" * len(labels) / whole", ""), "the first step: .* the whole batch"),
        ("gradients kept", ("    optimizer.zero_grad()\n", ""), "after a skipped step: .* begins with no gradients"),
    ],
    "11": [
        ("three calls", ("return result.split([layer.out_features for layer in layers], dim=-1)",
            "return [layer(x) for layer in layers]"), "one product .* found 4"),
        ("no bias", ("(x, weight, bias)", "(x, weight)"), "result 1: .* differs"),
        ("copies of the weights", ("layer.weight for", "layer.weight.detach() for"), "3 weights .* no gradient"),
    ],
    "12": [
        ("as far as each rank gets", ("total - step + rank * batch + 1", "total - batch + 1"),
            r"as many batches on each rank, found \["),
        ("from the beginning", ("range(done + rank", "range(rank"), "5 positions done, after 1 step: .* found 0"),
        ("each worker has all", ("[worker::workers]", ""), "in place 5 of all positions, found 0"),
    ],
    "13": [
        ("the sum", (" / torch.distributed.get_world_size()", ""),
            "step 1, .* gradient of layers.5.bias on rank 0: expected the mean .* found the sum"),
        ("waits in the hook", (START, "self.all_reduce(flat).wait()"), "right, but: .* during backward, found . call"),
        ("after backward", (FULL, "pass"), "as soon as it is full, found 42.2 kB of 42.2 kB"),
        ("not empty for the next step", (EMPTY, f"{EMPTY} if at_least > 1 else self.bucket"),
            "step 2, .* expected all_reduce to be given the 42.2 kB of gradients, found"),
        ("other buckets on rank 1", (FULL, "self.start(self.bucket_bytes * (1 + 0.9 * torch.distributed.get_rank()))"),
            "as many bytes on each rank"),
        ("an error", ("each.nbytes", "each.nbites"), "it raised AttributeError: .* .line 13 of what you"),
        ("asks until it is done", (START, f"{START}\n            while not self.started[-1].done(): ..."),
            "right, but: expected less than 60% exposed"),
        ("the last bucket is lost", ("self.start(at_least=1)", "pass"), "found that of this rank alone"),
        ("one for each parameter", (FULL, "self.start(at_least=1)"), "full buckets, found .* in calls 1 and 2 of 12"),
        ("does not wait", (WAIT, "self.started.clear()"), r"ended when wait\(\) returned, found . of . that had not"),
        ("waits again", (WAIT, "for future in self.started:\n            future.wait()"),
            "step 2, .* all-reduces? of earlier steps"),
    ],
}  # fmt: skip
CASES = [
    pytest.param(number, change, said, id=f"{number}, {title}")
    for number, cases in WRONG.items()
    for title, change, said in cases
]


def cells_of(number):
    (path,) = (config.PROJECT / "notebooks").glob(f"{number}-*.ipynb")
    return nbformat.read(path, 4).cells


def code_of(number, tag):
    """Return what the reader writes: the placeholder, or the solution without the line that checks it."""
    source = next(cell.source for cell in cells_of(number) if tag in cell.metadata.get("tags", []))
    return re.sub(r"^%%writefile.*\n", "", source).partition("\n\n\nassert checks.")[0]


def checked(number, code, folder):
    """Give what the code defines, or a file of it, to the notebook's check."""
    text = "\n".join(cell.source for cell in cells_of(number))
    check, name = re.search(r"^assert checks\.(\w+)\((\w+)", text, re.MULTILINE).groups()
    path = folder / f"written_{number}.py"
    path.write_text(code, encoding="utf-8")
    if number == "06":  # a worker imports it
        return getattr(checks, check)(path)
    scope = dict(NAMES)
    exec(compile(code, path, "exec"), scope)
    return getattr(checks, check)(scope[name])


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    """The folder from which a spawned worker imports, as in the notebook."""
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("written_06", None)


@pytest.mark.parametrize(("number", "change", "said"), CASES)
def test_a_wrong_answer_is_answered_with_what_was_found(number, change, said, tmp_path, capsys):
    right = code_of(number, "solution")
    assert change[0] in right
    assert checked(number, right.replace(*change), tmp_path) is False
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("Not yet: ")
    assert re.search(said, printed), printed


@pytest.mark.processes
@pytest.mark.parametrize("number", WRONG)
def test_the_solution_of_the_notebook_is_right_and_its_placeholder_none(number, tmp_path, capsys):
    assert checked(number, code_of(number, "exercise"), tmp_path) is False
    assert capsys.readouterr().out.startswith("Nothing to check yet: ")
    (tmp_path / "right").mkdir()
    sys.path.insert(0, str(tmp_path / "right"))
    assert checked(number, code_of(number, "solution"), tmp_path / "right") is True
    assert capsys.readouterr().out.startswith("Right: ")


def test_another_way_that_is_right_is_accepted(tmp_path, capsys):
    """A bucket is started when the next gradient would not fit, and the results are put in place at the end."""
    code, put = code_of("13", "solution"), "torch.nn.utils.vector_to_parameters"
    would_not_fit = "self.start(at_least=max(1, self.bucket_bytes + 1 - parameter.nbytes))"
    for old, new in (
        ("self.bucket.append(", f"{would_not_fit}\n        self.bucket.append("),
        (FULL, "pass"),
        (f"{put}(flat, self.bucket)", "bucket = self.bucket"),
        (START, "self.started.append((bucket, self.all_reduce(flat)))"),
        ("self.started.pop().wait()", f"bucket, future = self.started.pop(); {put}(future.wait(), bucket)"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    assert checked("13", code, tmp_path) is True, capsys.readouterr().out


@pytest.mark.parametrize(("number", "text", "said"), [
    ("06", None, "Nothing to check yet: there is no file"),
    ("06", "class PackedImages(Dataset)", r"SyntaxError: .*line 1 of what"),
    ("06", "class Packed: ...", "Not yet: no PackedImages can be imported from written_06.py: AttributeError"),
    ("08", "def one_ahead(loader, start_copy, finish_copy):\n    for batch in loader:\n        yield start_copy()",
        r"TypeError: .*line 3 of what"),
    ("00", "def items_per_second(dataset, count):\n    while True: time.sleep(1)", "not ended after 2 s"),
])  # fmt: skip
def test_an_error_names_the_line(number, text, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(answering, "LIMIT", 2.0 if number == "00" else 100.0)
    if text is None:
        assert checks.packed_images(tmp_path / "written_06.py") is False
    else:
        assert checked(number, text, tmp_path) is False
    assert re.search(said, capsys.readouterr().out)
