"""Each check answers the placeholder, the solution, and typical wrong answers: the solution with a mistake."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import psutil
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader

from helpers import config
from helpers.lessons import checks, distributed_checks

NAMES = {  # what the cells have imported
    "DataLoader": DataLoader, "Image": Image, "ImageOps": ImageOps, "cross_entropy": nn.functional.cross_entropy,
    "nn": nn, "np": np, "time": time, "torch": torch,
}  # fmt: skip
LESSONS = {  # the check of each notebook, and what the reader writes
    "00": ("items_per_second", "items_per_second"),
    "01": ("share_of_waiting", "share_of_waiting"),
    "02": ("host_waits", "host_waits"),
    "03": ("best_workers", "best_workers"),
    "04": ("mean_and_std", "mean_and_std"),
    "05": ("resize", "resized"),
    "06": ("packed_images", "PackedImages"),
    "07": ("crop_pairs", "crop_pairs"),
    "08": ("one_ahead", "one_ahead"),
    "09": ("channel_norm", "channel_norm"),
    "10": ("accumulated_step", "accumulated_step"),
    "11": ("three_in_one", "three_in_one"),
    "12": ("split", "split"),
    "13": ("overlap", "Overlapped"),
}
FILES = ("06", "13")  # what the reader writes is a file
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
        ("seconds instead", ("return count / (", "return ("), "expected .* items/s, found 0"),
        ("one item", ("range(count)", "range(1)"), "expected 50 items to be read, found 1 item"),
        ("seconds an item", ("return count / (", "return 1 / count * ("), "50 items took"),
    ],
    "01": [
        ("in percent", ("return waiting", "return 100 * waiting"), "Expected a share of 0.6250, found 62.5"),
        ("of both together", ("/ stepping", "/ (waiting + stepping)"), "of 0.6250, found 0.3846"),
        ("the GPU's marks, too", ('event.get("cat") == "user_annotation" and ', ""), "trace of a GPU.*found 0.1200"),
        ("the last step", ("stepping +=", "stepping ="), "of 0.6250, found 1.6667"),
        ("each has a category", ('event.get("cat")', 'event["cat"]'), "KeyError: 'cat'"),
    ],
    "02": [
        ("the start counts", ("sum(waits[1:]), sum(steps[1:])", "sum(waits), sum(steps)"), "of 0.385, found 0.735"),
        ("mean of the shares", ("return waiting / (waiting + stepping)",
            "return sum(w / (w + s) for w, s in zip(waits[1:], steps[1:])) / len(waits[1:])"), "of 0.385, found"),
        ("a number of its own", ("waiting + stepping)", "stepping)"), "of 0.385, found 0.625"),
        ("another clock", ("ready = clock()", "ready = time.perf_counter()"), "of 0.385, found"),
    ],
    "03": [
        ("one after the other", (
            "for _ in range(5):\n        for workers in random.sample(candidates, len(candidates)):",
            "for workers in candidates:\n        for _ in range(5):"), "Found the order 0, 1, 2, 4:"),
        ("the start counts", ("range(1 + 2 * workers)", "range(0)"), "a quiet machine: expected 2, found 0"),
        ("what was ready counts", ("range(1 + 2 * workers)", "range(1)"), "a quiet machine: expected 2, found 4"),
        ("the seconds", ("return min(candidates, key=lambda workers: statistics.geometric_mean(seconds[workers]))",
            "return min(statistics.mean(each) for each in seconds.values())"), "of the candidates .*, found 0.0"),
        ("the slowest", ("return min(", "return max("), "expected 2, found 0"),
        ("a single round", ("range(5)", "range(1)"), "5 rounds of 10 batches"),
        ("another clock", ("clock()", "time.perf_counter()"), "nobody looked at the clock"),
        ("no step", ("step(*next(batches))", "next(batches)"), "a step with each batch, found 0"),
    ],
    "04": [
        ("no 255", ("images.double() / 255", "images.double()"), "a mean of 0"),
        ("mean of the means", (SUMS, MEANS), "the last batch has fewer"),
        ("squares of bytes", ("(pixels**2)", "(images**2 / 255**2)"), "a standard deviation of .* do not fit"),
        ("no variance", ("squares / count - mean**2", "squares / count"), "expected a standard deviation of"),
        ("one for all", ("return mean, ", "return mean.mean(), "), "each of 3 channels, found 1 number"),
        ("all at once", ("in loader:", "in list(loader):"), "3 of 3 batches were in memory"),
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
    "07": [
        ("one place for all", ("(2, len(low))", "(2, 1)"), "RuntimeError|the same place"),
        ("one draw", ("top, left = torch.randint(places, (2, len(low)), device=low.device)",
            "top, left = torch.randint(places, (2, 1)).expand(2, len(low))"), "2,000 crops begin at the same place"),
        ("never the last place", ("- size + 1", "- size"), "from 0 to 4 each way; found 0 to"),
        ("down as far as to the right", ("top, left = torch.randint(places, (2, len(low)), device=low.device)",
            "top = left = torch.randint(places, (len(low),))"), "about 80 at each of 5 × 5 places.*found 0 to"),
        ("another place in high", ("scale * top, scale * left", "top, left"), "crops of high, where high is 2 times"),
        ("always twice as large", ("high.shape[2] // low.shape[2]", "2"), r"expected the shape \(2000, 3, 12, 12\)"),
        ("small crops of high", ("scale * left, scale * size", "scale * left, size"), r"shape \(2000, 3, 8, 8\)"),
        ("in floats", ("return take(low, top, left, size)", "return take(low.float(), top, left, size)"),
            "torch.int64 came in, torch.float32 came out"),
        ("image by image", (
            "return take(low, top, left, size), take(high, scale * top, scale * left, scale * size)", ONE_BY_ONE),
            "× as fast as image by image; expected 5× or more"),
    ],
    "08": [
        ("not ahead", (AHEAD, "        yield finish_copy(following)"), "nobody had started the copy of batch 1"),
        ("the last one is lost", (LAST, ""), "a loader of 6 expected as many batches, found 5"),
        ("all at once", ("for batch in loader:\n        following = start_copy(batch)",
            "for following in [start_copy(batch) for batch in loader]:"), "the copies of 5 batches after it"),
        ("finished too early", ("= start_copy(batch)", "= finish_copy(start_copy(batch))"), "had been called 3 times"),
        ("no empty loader", (LAST, LAST.replace("started is not None", "True")), "TypeError"),
    ],
    "09": [
        ("not seen as before", (".permute(0, 3, 1, 2)", ""), r"the shape \(2, 6, 4, 5\), .*found \(2, 4, 5, 6\)"),
        ("contiguous", ("permute(0, 3, 1, 2)", "permute(0, 3, 1, 2).contiguous()"), r"out came \(120, 20, 5, 1\)"),
        ("there and back", ("images.permute", "images.contiguous().permute"), "copied on the way: aten::clone"),
        ("the whole image", ("weight.shape, weight, bias", "rows.shape[1:]"), "over the 6 channels"),
        ("learns nothing", ("weight, bias)\n", "weight.detach(), bias.detach())\n"), "RuntimeError|no gradient"),
    ],
    "10": [
        ("clipped too early", ("    scaler.unscale_(optimizer)\n", ""), "clipped to 0.1: with the whole batch"),
        ("not clipped", ("    torch.nn.utils.clip_grad_norm_(model.parameters(), largest_norm)\n", ""),
            "clipped to 0.1: with the whole batch"),
        ("sum of the means", (" * len(labels) / whole", ""), "the first step: with the whole batch"),
        ("mean of the means", (" * len(labels) / whole", " / len(parts)"), "the first step: with the whole batch"),
        ("the last part only", ("        scaler.scale", "        optimizer.zero_grad()\n        scaler.scale"),
            "the first step: with the whole batch"),
        ("gradients kept", ("    optimizer.zero_grad()\n", ""), "after a skipped step: .* begins with no gradients"),
        ("in float32", ("torch.bfloat16", "torch.bfloat16, enabled=False"), "to give bfloat16, found torch.float32"),
        ("its own step", ("scaler.step(optimizer)", "optimizer.step()"), "became infinite or nan"),
        ("no update", ("    scaler.update()", "    pass"), "RuntimeError: unscale_"),
        ("no scaler", ("scaler.scale(loss)", "loss"), "AssertionError: Attempted unscale_"),
    ],
    "11": [
        ("three calls", ("return result.split([layer.out_features for layer in layers], dim=-1)",
            "return [layer(x) for layer in layers]"), "one product .* found 4"),
        ("cut alike", ("split([layer.out_features for layer in layers], dim=-1)", "chunk(3, dim=-1)"),
            r"expected \(32, 16\), found \(32, 19\)"),
        ("no bias", ("(x, weight, bias)", "(x, weight)"), "result 1 differs"),
        ("copies of the weights", ("layer.weight for", "layer.weight.detach() for"), "would not learn"),
    ],
    "12": [
        ("as far as each rank gets", ("total - step + rank * batch + 1", "total - batch + 1"),
            r"as many batches on each rank, found \["),
        ("from the beginning", ("range(done + rank", "range(rank"), "1 step of .*, 5 positions done: .*expected posi"),
        ("a worker has a part", ("[worker::workers]", "[worker * 3:][:3]"), "expected .*position .*, found"),
        ("each worker has all", ("[worker::workers]", ""), "found position 0"),
        ("the last is short", ("total - step + rank * batch + 1, step)\n    return [range(start, start + batch)",
            "total, step)\n    return [range(start, min(start + batch, total))"), "(each|as many).*, found"),
    ],
    "13": [
        ("the sum", (" / torch.distributed.get_world_size()", ""),
            "step 1, .* gradient of layers.5.bias on rank 0 is the sum, not the mean"),
        ("no all-reduce", (START, "pass"), "all_reduce, which Overlapped was given, was never called"),
        ("waits in the hook", (START, "self.all_reduce(flat).wait()"),
            "right, but during backward a future's wait.* was called"),
        ("asks in the hook until it is done", (START, f"{START}\n            while not self.started[-1].done(): ..."),
            "too little overlaps: a step takes .* without .* as written, over a simulated network"),
        ("after backward", (FULL, "pass"), r"only in wait\(\): when backward had ended, 42.2 kB of 42.2 kB"),
        ("too late", (FULL, FULL.replace("=self", "=2.8 * self")), "started late: .* kB were ready and not started"),
        ("the last bucket is lost", ("self.start(at_least=1)", "pass"),
            r"only its own.*, so that wait\(\) has to start"),
        ("not empty for the next step", (EMPTY, f"{EMPTY} if at_least > 1 else self.bucket"),
            "step 2, .*42.2 kB of gradients, and all_reduce was given .* also for the next step"),
        ("one for each parameter", (FULL, "self.start(at_least=1)"),
            "called 12 times for 12 parameters: calls 1 and 2"),
        ("weights only", ("model.parameters()", "[each for each in model.parameters() if each.dim() > 1]"),
            "only its own, .* of layers.5.bias, layers.4.bias, .* Has each parameter a hook"),
        ("does not wait", (WAIT, "self.started.clear()"), r"wait\(\) returned while . of . all-reduces had not ended"),
        ("waits again", (WAIT, "for future in self.started:\n            future.wait()"),
            "step 2, .*once more for . all-reduces? of earlier steps"),
        ("a rank takes no part", (START, f"{START} if len(self.started) < 2 or torch.distributed.get_rank() else None"),
            "rank 1 has waited 10 s for all-reduce number 3 of step 1, .*: 2 on rank 0, 3 on rank 1"),
        ("an error", ("each.nbytes", "each.nbites"),
            "on rank 0 it raised AttributeError: .* .line 15 of written_13.py"),
        ("dies", (START, "__import__('os')._exit(3)"), "gave no answer. .*rank . exited with 3"),
    ],
}  # fmt: skip
MARKS = {"13": pytest.mark.processes}
CASES = [pytest.param(number, *case, marks=MARKS.get(number, ())) for number, cases in WRONG.items() for case in cases]
IDS = [f"{number}, {title}" for number, cases in WRONG.items() for title, *_ in cases]


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
    if number in FILES:
        return getattr(checks, check)(path)
    scope = dict(NAMES)
    exec(compile(code, path, "exec"), scope)
    return getattr(checks, check)(scope[name])


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    """The folder from which a spawned worker imports, as in the notebook."""
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for number in FILES:
        sys.modules.pop(f"written_{number}", None)


def test_each_check_has_three_wrong_answers():
    assert WRONG.keys() == LESSONS.keys()
    assert all(len(cases) >= 3 for cases in WRONG.values())


@pytest.mark.parametrize(("number", "title", "change", "said"), CASES, ids=IDS)
def test_a_wrong_answer_is_answered_with_what_was_found(number, title, change, said, tmp_path, capsys):
    right = code_of(number, "solution")
    assert change[0] in right
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


OTHERS = {  # right, and written in another way than the solution
    "03": """
def best_workers(new_loader, step, candidates, clock):
    running = {workers: iter(new_loader(workers)) for workers in candidates}
    seconds = dict.fromkeys(candidates, 0)
    for number in range(7):
        for workers, batches in running.items():
            start = clock()
            for _ in range(10):
                step(*next(batches))
            seconds[workers] += clock() - start if number > 1 else 0
    return min(seconds, key=seconds.get)
""",
    "04": """
def mean_and_std(loader):
    count = sum(images[:, 0].numel() for images, labels in loader)
    mean = sum(images.float().sum((0, 2, 3)) for images, labels in loader) / count
    squares = sum(((images - mean.view(3, 1, 1)) ** 2).sum((0, 2, 3)) for images, labels in loader)
    return (mean / 255).tolist(), ((squares / count) ** 0.5 / 255).tolist()
""",
    "09": """
def channel_norm(images, weight, bias):
    images = images - images.mean(1, keepdim=True)
    images = images / (images.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return images * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
""",
    "10": """
def accumulated_step(model, optimizer, scaler, parts, largest_norm):
    count = sum(map(len, next(zip(*parts))))
    for images, labels in parts:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        scaler.scale(cross_entropy(logits.float(), labels, reduction="sum") / count).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
""",
    "13": """
import torch
import torch.distributed as dist


class Overlapped:  # starts a bucket when the next gradient would not fit, and puts the results in place at the end
    def __init__(self, model, bucket_bytes, all_reduce):
        self.most, self.all_reduce, self.waiting, self.bytes, self.sent = bucket_bytes, all_reduce, [], 0, []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.collect)

    def collect(self, parameter):
        if self.waiting and self.bytes + parameter.nbytes > self.most:
            self.send()
        self.waiting.append(parameter)
        self.bytes += parameter.nbytes

    def send(self):
        flat = torch.cat([each.grad.flatten() for each in self.waiting])
        self.sent.append((self.waiting, self.all_reduce(flat)))
        self.waiting, self.bytes = [], 0

    def wait(self):
        self.send()
        for parameters, future in self.sent:
            mean = future.wait() / dist.get_world_size()
            for parameter, part in zip(parameters, mean.split([each.numel() for each in parameters])):
                parameter.grad.copy_(part.view_as(parameter))
        self.sent.clear()
""",
}


@pytest.mark.parametrize("number", [pytest.param(number, marks=MARKS.get(number, ())) for number in OTHERS])
def test_another_way_that_is_right_is_accepted(number, tmp_path, capsys):
    assert checked(number, OTHERS[number], tmp_path) is True, capsys.readouterr().out


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
    code = "def one_ahead(loader, start_copy, finish_copy):\n    for batch in loader:\n        yield start_copy()"
    assert checked("08", code, tmp_path) is False
    assert "TypeError" in (said := capsys.readouterr().out) and "(line 3 of your cell)" in said


@pytest.mark.processes
def test_a_job_that_does_not_end_is_ended_and_leaves_no_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "LIMIT", 15)
    endless = code_of("13", "solution").replace(START, "while True: ...")
    assert checked("13", endless, tmp_path) is False
    assert "Not yet: two ranks ran it, and gave no answer." in (said := capsys.readouterr().out) and "15 s" in said
    command_lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not [words for words in command_lines if str(tmp_path / "written_13.py") in words]


def test_an_error_while_a_file_is_imported_names_its_line(tmp_path, capsys):
    assert checked("13", "import torch\n\nclass Overlapped(torch.Modul): ...\n", tmp_path) is False
    said = capsys.readouterr().out
    assert said.startswith("Not yet: no Overlapped can be imported from written_13.py: AttributeError: ")
    assert said.endswith("(line 3)\n")


def test_what_is_chained_to_an_all_reduce_finds_it_ended():
    calls = SimpleNamespace(step=1, in_backward=True, blocked=0, again=0)
    source, seen = torch.futures.Future(), []
    noted = distributed_checks._Noted(calls, source, "the first")
    noted.then(lambda _: seen.append(noted.arrived.is_set()))
    source.set_result(torch.ones(1))
    assert seen == [True]
