"""Each check answers the placeholder, the solution, and typical wrong answers: the solution with a mistake."""

import os
import random
import re
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.notebooks import NOTEBOOKS, content
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from helpers.lessons import checks, exercises
from helpers.lessons.checks import answering

NAMES = {  # what the cells have imported
    "DataLoader": DataLoader, "Image": Image, "ImageOps": ImageOps, "checkpoint": checkpoint,
    "checks": checks, "cross_entropy": nn.functional.cross_entropy, "nn": nn, "np": np, "os": os, "time": time,
    "torch": torch, "zipfile": zipfile,
}  # fmt: skip
KEPT = '        if self.images is None:\n            self.images = np.load(self.path, mmap_mode="r")\n'
WITHOUT_STATE = '    def __getstate__(self):\n        return self.__dict__ | {"images": None}\n\n'
DEVIATION = "(squares / count - mean**2).sqrt()"
SUMS = "count += pixels.numel() / 3  # of one channel\n        total += pixels.sum(dim=(0, 2, 3))\n"
MEANS = "count += 1\n        total += pixels.mean(dim=(0, 2, 3))\n"
LAST = "\n    if started is not None:\n        yield finish_copy(started)"
AHEAD = "        if started is not None:\n            yield finish_copy(started)\n        started = following" + LAST
IN_FOURS = """return tuple(torch.cat([take(images[n:n + 4], scale * top[n:n + 4], scale * left[n:n + 4],
        scale * size) for n in range(0, len(low), 4)]) for images, scale in ((low, 1), (high, scale)))"""
START, EMPTY = "self.started.append(self.all_reduce(flat))", "self.bucket = []"
EARLY = "self.start(at_least=max(1, self.bucket_bytes + 1 - parameter.nbytes))"  # the next gradient would not fit
ADD, LEFT, PART = "self.bucket.append(parameter.grad)", "self.start(at_least=1)", "scaler.scale(loss).backward()"
FLUSHED = "        os.fsync(file.fileno())  # on the disk, before it takes the old one's place\n"
RENAMED = '    path.with_suffix(".new").replace(path)\n'
ROUNDS = "for _ in range(5):\n        for workers in random.sample(candidates, len(candidates)):"
FRESH = f"{ROUNDS}\n            batches = iter(new_loader(workers))\n            for _ in range("
MADE = "kept = {workers: iter(new_loader(workers)) for workers in candidates}\n    for again"
KEPT_LOADERS = FRESH.replace("iter(new_loader(workers))", "kept[workers]").replace("for _", MADE, 1)
SIZE, BATCH = "(round(photo.width * factor), round(photo.height * factor))", "torch.from_numpy(self.images[indices])"
FULL, WAIT = "self.start(at_least=self.bucket_bytes)", "while self.started:\n            self.started.pop().wait()"


# Plausible wrong answers by notebook: what is wrong, where the solution is changed, and what only its refusal mentions.
WRONG = {
    "00": [("seconds instead", ("return count / (", "return ("), "seconds of all items"),
        ("seconds an item", ("return count / (time.perf_counter() - start)",
            "return (time.perf_counter() - start) / count"), "invert"),
        ("CPU time", ("perf_counter", "process_time"), "process_time stops"),
        ("one item", ("range(count)", "range(1)"), "found 1 item"),
        ("the same item", ("dataset[index]", "dataset[0]"), "different items"),
        ("all items", ("index in range(count):\n        dataset[index]", "item in dataset: ..."), "found 200"),
        ("no end", ("for index in range(count):", "while True:\n        index = 0"), "without an end")],
    "01": [("in percent", ("return waiting", "return 100 * waiting"), "percent"),
        ("the GPU's marks, too", ('event.get("cat") == "user_annotation" and ', ""), "GPU.*twice"),
        ("means", ("return waiting / stepping", """waits = sum("DataLoader" in event["name"] for event in events)
    return waiting / waits / (stepping / (waits - 1))"""), "more than one wait"),
        ("the wait counts twice", ("waiting / stepping", "waiting / (waiting + stepping)"), "includes its wait")],
    "02": [("the start counts", ("sum(waits[1:]), sum(steps[1:])", "sum(waits), sum(steps)"), "start"),
        ("another clock", ("clock()", "time.perf_counter()"), "clock that was given"),
        ("waits by steps", ("(waiting + stepping)", "stepping"), "its waits plus its steps"),
        ("mean of shares", ("return waiting / (waiting + stepping)",
            "return float(np.mean([wait / (wait + step) for wait, step in zip(waits[1:], steps[1:])]))"), "mean of")],
    "03": [("in turn", (ROUNDS, "for workers in candidates:\n        for _ in range(5):"), "order 0, 1, 2, 3"),
        ("the start counts", ("range(1 + 2 * workers)", "range(0)"), "to start"),
        ("what was ready counts", ("range(1 + 2 * workers)", "range(1)"), "ready at first"),
        ("loaders that are kept", (FRESH, f"{KEPT_LOADERS}not again and "), "ready after others were timed"),
        ("ten batches", ("math.ceil(10 / period) * period", "10"), "of 4 workers hold 3 long waits"),
        ("the last round alone", (".append((clock() - start) / count)", " = [(clock() - start) / count]"),
            "expected 2, found 3"),
        ("the slowest", ("min(candidates, key", "max(candidates, key"), "batches take longest")],
    "04": [("no 255", ("images.double() / 255", "images.double()"), "from 0 to 255"),
        ("mean of the means", (SUMS, MEANS), "last batch has fewer"),
        ("images of another size", ("pixels.numel() / 3", "len(images) * 32 * 32"), "3, 8, 6"),
        ("the first batch's count", ("pixels.numel() / 3", "50 * 8 * 6"), "not each time those of the first"),
        ("all colours together", ("pixels.numel() / 3", "pixels.numel()"), "pixels of one channel"),
        ("the other way round", (f"mean, {DEVIATION}", f"{DEVIATION}, mean"), "mean comes first"),
        ("not a mean", ("mean = total / count", "mean = total"), r"found \d{3,}[^A-Z]*$"),
        ("all at once", ("in loader:", "in list(loader):"), "3 of 3 batches in memory"),
        ("mean deviation", (DEVIATION, "sum((x / 255).std((0, 2, 3)) for x, _ in loader) / 3"), "batches' deviations"),
        ("variance", (".sqrt()", ""), "That is the variance"),
        ("squares of bytes", ("squares += (pixels**2)", "squares += (images**2).double().div(255**2)"), "into a byte")],
    "05": [("squashed", (SIZE, "(side, side)"), "100, 100"),
        ("cut off", (SIZE, SIZE.replace("round", "int")), r"found \(99, 155"),
        *[(turn, ('.convert("RGB")', f'.convert("RGB").transpose(Image.Transpose.{turn})'), "a wide photo.*turned")
            for turn in ("ROTATE_180", "FLIP_LEFT_RIGHT", "FLIP_TOP_BOTTOM")],
        ("the wrong way", ("ImageOps.exif_transpose(photo)",
            "photo.rotate(90 if photo.getexif()[0x0112] == 6 else 0, expand=True)"), "EXIF.*turned"),
        ("the longer side", ("min(photo.size)", "max(photo.size)"), r"100, 62"),
        ("grey stays grey", ('.convert("RGB")', ".copy()"), "mode RGB, found L"),
        ("lying", ("ImageOps.exif_transpose(photo)", "photo"), r"EXIF.*found \(160, 100")],
    "06": [("opened at once", (", None\n", ", np.load(path, mmap_mode='r')\n"), "when it is created"),
        ("pickled whole", (WITHOUT_STATE, ""), "found 9.2. MB"),
        ("sorted", (KEPT, KEPT + "        indices = sorted(indices)\n"), "in this order"),
        ("all for each batch", (KEPT, "        self.images = np.load(self.path)\n"), "of 12 kB"),
        ("from the first to the last", (BATCH, BATCH.replace("[", "[:max(indices) + 1].copy()[")), "of 12 kB"),
        ("all as a tensor", (BATCH, "torch.tensor(self.images)[indices]"), "of 12 kB"),
        ("one map for all", (KEPT, """        global mapped\n        if "mapped" not in globals():
            mapped = np.load(self.path, mmap_mode="r")\n        self.images = mapped\n"""), "another file"),
        ("as floats", (BATCH, f"{BATCH} / 255"), "found torch.float32"),
        ("an array", (BATCH, "self.images[indices]"), "two tensors")],
    "07": [("one draw", ("(2, len(low)), device=low.device)", "(2, 1)).expand(2, len(low))"), "Draw one place"),
        ("another place in high", ("scale * top, scale * left", "top, left"), "scale times"),
        ("an off by one", ("size + 1", "size"), "H - size, these included"),
        ("one for both", ("device=low.device)", "device=low.device)[:1].repeat(2, 1)"), "and one for its column"),
        ("low only", ("left, size), take(", "left, size)\n    take("), "two ten"),
        ("the same places", ("    top, left =", "    torch.manual_seed(0)\n    top, left ="), "in each call"),
        ("four by four", ("return take", IN_FOURS + "\n    return take"), "operators for 2,000 pairs"),
        ("as large in high", ("scale * left, scale * size", "scale * left, size"), "8, 8")],
    "08": [("not ahead", (AHEAD, "        yield finish_copy(following)"), "is left, found 0"),
        ("the last one is lost", (LAST, ""), "loader of 6, found 5"),
        ("all at once", ("for batch in loader:\n        following = start_copy(batch)",
            "for following in [start_copy(batch) for batch in loader]:"), "is left, found 5"),
        ("no first", ("started = None", "loader = iter(loader)\n    started = start_copy(next(loader))"), "no batch"),
        ("reads all first", ("    started = None", "    loader = list(loader)\n    started = None"), "read, found 6"),
        ("not for an empty one", (LAST, "\n    yield finish_copy(started)"), "loader of 0")],
    "09": [("GFLOP", ("min(tflops, intensity * gb_per_second / 1e3)", "min(tflops * 1e3, intensity * gb_per_second)"),
            "Those are GFLOP/s"),
        ("the higher limit", ("min(", "max("), "The lower limit holds"),
        ("no peak", ("min(tflops, ", "max(0, "), "faster than the peak"),
        ("bytes per operation", ("intensity * gb_per_second", "gb_per_second / intensity"), "More operations per byte"),
        ("a list", ("min(tflops, intensity * gb_per_second / 1e3)", "[tflops]"), "a number")],
    "10": [("not seen as before", (".permute(0, 3, 1, 2)", ""), r"found \(2, 4, 5, 6\)"),
        ("contiguous", ("permute(0, 3, 1, 2)", "permute(0, 3, 1, 2).contiguous()"), r"found \(120, 20, 5, 1\)"),
        ("there and back", ("images.permute", "images.contiguous().permute"), "aten::clone"),
        ("nothing learns", ("rows.permute", "rows.detach().permute"), "no_grad"),
        ("not scaled", ("weight.shape, weight, bias)", "weight.shape)"), "left out")],
    "11": [("clipped too early", ("    scaler.unscale_(optimizer)\n", ""), "scaler's factor"),
        ("sum of the means", (" * len(labels) / whole", ""), "mean over all its images"),
        ("mean of the means", ("len(labels) / whole", "1 / len(parts)"), "counts less"),
        ("gradients kept", ("    optimizer.zero_grad()\n", ""), "left from before"),
        ("no update", ("    scaler.update()", ""), "found none"),
        ("whole", ("in parts:", "in [map(torch.cat, zip(*parts))]:"), "found 16"),
        ("added up", (PART, "total = locals().get('total', 0) + loss\n    scaler.scale(total).backward()"), "found 16"),
        ("a step for each part", (PART, f"{PART}\n        scaler.step(optimizer)\n        scaler.update()"), "found 3"),
        ("an update for each part", (PART, f"{PART}\n        scaler.update()"), "once, after its step"),
        ("not in bfloat16", ("torch.bfloat16)", "torch.bfloat16, enabled=False)"), "bfloat16 from")],
    "12": [("a tuple", ("return one", "return one, one"), "one nn.Linear, found tuple"),
        ("query's outputs only", ("sum(layer.out_features for layer in layers)", "query.out_features"), "must match"),
        ("new bias", ("        one.bias.copy_(torch.cat([layer.bias for layer in layers]))\n", ""), "come first"),
        ("no bias", ("        one.bias.copy_(torch.cat([layer.bias for layer in layers]))", "        one.bias.zero_()"),
            "without the bias"),
        ("frozen", ("return one", "return one.requires_grad_(False)"), "0 of 2 that learn"),
        ("changed layers", ("return one", "query.weight.data.zero_()\n    return one"), "a changed weight"),
        ("one function", ("return one", "return lambda x: one(x)"), "found function")],
    "13": [("not at all", ("checkpoint(half, x, use_reentrant=False)", "half(x)"), "Nothing is computed again"),
        ("one part", ("(network[:middle], network[middle:])", "[network]"), "One part alone"),
        ("each layer", ("(network[:middle], network[middle:])", "network"), "Each half is one part"),
        ("the first half", ("(network[:middle], network[middle:])", "[network[:middle]]"), "the result of network"),
        ("without gradients", ("    return x", "    return x.detach()"), "result from which"),
        ("detached", ("checkpoint(half, x,", "checkpoint(half, x.detach(),"), "Before a detach"),
        ("nothing returned", ("    return x", ""), "a tensor, found NoneType")],
    "14": [("one byte less", ("<= gap:", "< gap:"), r"gap 2: expected \["),
        ("one byte more", ("<= gap:", "<= gap + 1:"), r"\(20, 25\)\], gap 1"),
        ("the last end", ("max(end, requests[-1][1])", "end"), r"\(2, 5\)"),
        ("no first one", ("if requests and start", "if start"), r"gap 2: it raised IndexError"),
        ("emptied", ("for start, end in ranges:", "while ranges:\n        start, end = ranges.pop(0)"), "unchanged"),
        ("a generator", ("return requests", "yield from requests"), "a list")],
    "15": [("as far as a rank gets", ("(total - done) // (batch * world)",
            "(total - done - (rank + 1) * batch) // (batch * world) + 1"), "batches on each rank"),
        ("from the beginning", ("[done + (", "[("), "done already"),
        ("not in batches", ("range(start, start + batch) for", "start for"), "a list of b"),
        ("each worker has all", ("range(worker, steps, workers)", "range(steps)"), "came before"),
        ("the rest, too", ("// (batch * world)", "// (batch * world) + 1"), "nothing more")],
    "16": [("the whole batch on each", ("batch // world", "batch"), r"found 16 \+ 16"),
        ("all images on both", ("(dataset)\n", "(dataset, 1, 0)\n"), "48 images on both"),
        ("each epoch alike", ("        sampler.set_epoch(epoch)\n", ""), "another order"),
        ("weights of its own", ("    model = nn.parallel.DistributedDataParallel(model)\n", ""), "of one process"),
        ("both print", ("if rank == 0", "if True"), "3 lines of rank 1"),
        ("the own loss", ("        dist.all_reduce(mean)\n", "        mean *= world\n"), "rank 0's own loss"),
        ("the sum", ("mean / world", "mean"), "sum over the ranks"),
        ("no group", ('    dist.init_process_group("gloo")\n', ""), "ValueError: .* .line 7 of what you")],
    "16.1": [("the sum", (" / torch.distributed.get_world_size()", ""), r"found the sum\."),
        ("waits in the hook", (START, "self.all_reduce(flat).wait()"), r"future's wait\(\)"),
        ("after backward", (FULL, "pass"), "full, found 42.2 kB"),
        ("not empty for the next step", (EMPTY, f"{EMPTY} if at_least > 1 else self.bucket"), "new, empty one"),
        ("others on rank 1", (ADD, f"if torch.distributed.get_rank(): {EARLY}\n        {ADD}"), "same bytes"),
        ("an error", ("each.nbytes", "each.nbites"), "AttributeError: .* .line 14 of what you"),
        ("asks until it is done", (START, f"{START}\n            while not self.started[-1].done(): ..."), r"done\(\)"),
        ("the last bucket is lost", ("self.start(at_least=1)", "pass"), "this rank's own"),
        ("one for each parameter", (FULL, "self.start(at_least=1)"), "full buckets"),
        ("divided too early", (START, f"{START}; flat /= torch.distributed.get_world_size()"), "left alone"),
        ("for two ranks", ("torch.distributed.get_world_size()", "2"), "divided by 2"),
        ("more than full", (">= at_least", "> at_least"), "full, found 272 bytes"),
        ("a gradient later", (f"{ADD}\n        {FULL}", f"{FULL}\n        {ADD}"), "full, found 18"),
        ("the last one late", (LEFT, f"{WAIT}\n        {LEFT}\n        {WAIT} #"), "before wait.. waits"),
        ("early", ("post_accumulate_grad_hook(self.ready)", "hook(lambda _: self.ready(parameter))"), "register_hook"),
        ("does not wait", (WAIT, "self.started.clear()"), "that had not"),
        ("waits again", (WAIT, "for future in self.started:\n            future.wait()"), "of earlier steps")],
    "17": [("written over", ('path.with_suffix(".new")', "path"), "written over"),
        ("not on the disk", (FLUSHED, ""), "call of os.fsync"),
        ("a moment without", (RENAMED, "    path.unlink()\n" + RENAMED.replace("replace", "rename")), "os.unlink"),
        ("removed", (RENAMED, '    os.remove(path)\n    os.rename(path.with_suffix(".new"), path)\n'), "os.remove"),
        ("from elsewhere", ("path.with_suffix", "path.parent.with_suffix"), "beside the old one"),
        ("another file", ("os.fsync(", 'with path.open("ab") as old: os.fsync(old.fileno());('), "of all bytes"),
        ("in spite of an error", ("        torch.save(state, file)",
            "        try: torch.save(state, file)\n        except Exception: ..."), "after an error"),
        ("only once", ('"wb"', '"xb"'), "a file: it raised FileE"), ("at the end", ('"wb"', '"ab"'), "file: expected"),
        ("renamed first", (FLUSHED + RENAMED, RENAMED + "    with path.open() as file:\n" + FLUSHED), "it later"),
        ("not looked at", ("if zipfile.ZipFile(path).testzip()", "if not zipfile.ZipFile(path)"), "found a state"),
        ("None", ("        raise ValueError(", "        return\n        raise ValueError("), "found None")],
}  # fmt: skip
PUT = "torch.nn.utils.vector_to_parameters"
RIGHT = [
    ("03", [(FRESH, KEPT_LOADERS)]),  # warmed up again in each round
    ("03", [("range(1 + 2 * workers)", "range(12)"), ("geometric_mean", "median")]),
    ("03", [("math.ceil(10 / period) * period", "12")]),
    ("04", [(f"mean, {DEVIATION}", f"mean.view(1, 3, 1, 1), {DEVIATION}.view(1, 3, 1, 1)")]),
    ("05", [(SIZE, "[side * length // min(photo.size) for length in photo.size]")]),
    ("06", [("self.images is None", "True"), ('"r"', '"c"'), (BATCH, "torch.from_numpy(self.images)[indices]")]),
    ("10", [("permute(0, 2, 3, 1)", "permute(0, 2, 3, 1).view(-1, len(weight))"),
        ("return rows", "return rows.view(len(images), *images.shape[2:], -1)")]),
    pytest.param("16", [("dist.all_reduce(mean)", "dist.reduce(mean, 0)"), ("DistributedSampler(dataset)",
        "DistributedSampler(dataset, world, rank, seed=3)")], marks=pytest.mark.slow),
    ("16.1", [  # a bucket is also started when the next gradient would not fit; the results are put in place at the end
        (ADD, f"{EARLY}\n        {ADD}"), (f"{PUT}(flat, self.bucket)", "bucket = self.bucket"),
        (START, "self.started.append((bucket, self.all_reduce(flat)))"),
        ("self.started.pop().wait()", f"bucket, future = self.started.pop(); {PUT}(future.wait(), bucket)")]),
]  # fmt: skip


FILES = ("06", "16")  # whose answer is a file, which other processes import


def code_of(number, tag):
    """Return what the reader writes: the placeholder, or the solution without the line that checks it.

    "16.1" is the second exercise of notebook 16.
    """
    cells = content(NOTEBOOKS[int(number[:2])]).cells
    source = [cell.source for cell in cells if tag in cell.metadata.get("tags", [])][int(number[3:] or 0)]
    return re.sub(r"^%%writefile.*\n", "", source).partition("\n\n\nassert checks.")[0]


def checked(number, code, folder):
    """Give what the code defines, or a file of it, to the notebook's check."""
    text = "\n".join(cell.source for cell in content(NOTEBOOKS[int(number[:2])]).cells)
    found = re.findall(r"^assert checks\.(\w+)\((\w+(?:, \w+)*)", text, re.MULTILINE)
    check, names = found[int(number[3:] or 0)]
    path = folder / f"written_{number}.py"
    path.write_text(code, encoding="utf-8")
    if number in FILES:
        return getattr(checks, check)(path)
    scope = dict(NAMES)
    random.seed(0)  # 03: a wrong answer is right by chance in 1 of 300 orders of the rounds
    exec(compile(code, path, "exec"), scope)
    return getattr(checks, check)(*(scope[name] for name in names.split(", ")))


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    """The folder from which a spawned worker imports, as in the notebook."""
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("written_06", None)


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number",
    [pytest.param(each, marks=pytest.mark.slow) if each == "16" else each for each in WRONG],  # a job for each answer
)
def test_the_solution_is_right_and_each_wrong_answer_is_told_its_own_fault(number, tmp_path, capsys, monkeypatch):
    right, refusals = code_of(number, "solution"), {}
    assert checked(number, right, tmp_path) is True, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("Right: ")
    assert checked(number, code_of(number, "exercise"), tmp_path) is False
    assert capsys.readouterr().out.startswith("Nothing to check yet: ")
    for title, change, said in WRONG[number]:
        monkeypatch.setattr(answering, "LIMIT", 1.0 if title == "no end" else 100.0)
        assert change[0] in right
        assert checked(number, right.replace(*change), tmp_path) is False, title
        refusals[said] = capsys.readouterr().out.splitlines()[-1]
    for said, refusal in refusals.items():
        assert refusal.startswith("Not yet: ")
        assert [each for each in refusals if re.search(each, refusal)] == [said], refusal


@pytest.mark.processes
@pytest.mark.parametrize(("number", "changes"), RIGHT)
def test_another_way_than_the_notebooks_is_right(number, changes, tmp_path, capsys):
    code = code_of(number, "solution")
    for old, new in changes:
        assert code.count(old) == 1
        code = code.replace(old, new)
    assert checked(number, code, tmp_path) is True, capsys.readouterr().out


def test_the_solution_replaces_the_readers_answer_only_if_no_check_found_it_right():
    """Run All executes the solution's cell, too."""
    own = "def attainable(intensity, tflops, gb_per_second):\n    "
    for answer, stays in ((f"{own}return min(tflops, gb_per_second / 1e3 * intensity)", True), (f"{own}...", False)):
        scope = {"checks": checks}
        exec(answer, scope)
        before = scope["attainable"]
        assert checks.attainable(before) is stays
        exec(code_of("09", "solution"), scope)
        assert (scope["attainable"] is before) is stays
        assert checks.attainable(scope["attainable"])


def test_a_rounded_number_is_accepted():
    assert exercises.check("bytes for floats", 116)
    assert exercises.check("paid for itself", 2, once=1.8, before=2.0, after=1.0)


@pytest.mark.parametrize(("text", "said"), [
    ("class PackedImages(Dataset)", r"SyntaxError: .*line 1 of what"),
    ("class Packed: ...", "AttributeError: .*PackedImages"),
])  # fmt: skip
def test_an_error_of_a_file_names_its_line_or_what_is_missing(text, said, tmp_path, capsys):
    assert checks.packed_images(tmp_path / "written_06.py") is False
    assert "Nothing to check yet" in capsys.readouterr().out
    assert checked("06", text, tmp_path) is False
    assert re.search(said, capsys.readouterr().out)
