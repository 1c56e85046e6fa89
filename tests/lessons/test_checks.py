"""Each check answers the placeholder, typical wrong answers, and the solution that the notebook shows at last."""

import re
import textwrap
import time

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset

from helpers import config
from helpers.lessons import checks

NAMES = {  # what the cells have imported
    "DataLoader": DataLoader, "Dataset": Dataset, "Image": Image, "ImageOps": ImageOps,
    "cross_entropy": nn.functional.cross_entropy, "nn": nn, "np": np, "time": time, "torch": torch,
}  # fmt: skip
LESSONS = {
    "00": "items_per_second",
    "01": "train_step",
    "02": "two_clocks",
    "03": "new_loader",
    "04": "normalize",
    "05": "resize",
    "06": "packed_images",
    "08": "mean_loss",
    "09": "channels_last_step",
    "10": "mixed_step",
    "11": "three_in_one",
}

# For each check: what is wrong, the code, and what the answer must say.
WRONG = {
    "items_per_second": [
        ("seconds instead", """
            def written(dataset, count):
                start = time.perf_counter()
                for index in range(count): dataset[index]
                return time.perf_counter() - start
            """, "expected .* items/s, found 0"),
        ("one item", """
            def written(dataset, count):
                start = time.perf_counter()
                dataset[0]
                return 1 / (time.perf_counter() - start)
            """, "expected 50 items to be read, found 1 item"),
        ("the clock stopped before", """
            def written(dataset, count):
                start = time.perf_counter()
                seconds = time.perf_counter() - start
                for index in range(count): dataset[index]
                return count / seconds
            """, "50 items took"),
    ],
    "train_step": [
        ("nobody clears the gradients", """
            def written(model, optimizer, images, labels):
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                return loss.detach()
            """, "after step 2 a weight differs"),
        ("the value is read", """
            def written(model, optimizer, images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                return loss.item()
            """, "expected the loss as a tensor"),
        ("the graph is kept", """
            def written(model, optimizer, images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                return loss
            """, "holds the graph"),
        ("softmax twice", """
            def written(model, optimizer, images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images).softmax(1), labels)
                loss.backward()
                optimizer.step()
                return loss.detach()
            """, "expected a loss of .* in step 1"),
        ("no step", """
            def written(model, optimizer, images, labels):
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.zero_grad()
                return loss.detach()
            """, "after step 1 a weight differs"),
    ],
    "two_clocks": [
        ("the first one counts", """
            def written(loader, step):
                batches = iter(loader)
                start = time.perf_counter()
                for _ in range(20): batch = next(batches)
                middle = time.perf_counter()
                for _ in range(20): step(*batch)
                return (middle - start) / 20, (time.perf_counter() - middle) / 20
            """, "for loading alone"),
        ("one clock in the loop of both", """
            def written(loader, step):
                batches = iter(loader)
                step(*next(batches))
                start = time.perf_counter()
                for _ in range(20): step(*next(batches))
                seconds = (time.perf_counter() - start) / 20
                return seconds, seconds
            """, "for loading alone"),
        ("milliseconds", """
            def written(loader, step):
                batches = iter(loader)
                batch = next(batches)
                step(*batch)
                start = time.perf_counter()
                for _ in range(20): next(batches)
                middle = time.perf_counter()
                for _ in range(20): step(*batch)
                return (middle - start) * 50, (time.perf_counter() - middle) * 50
            """, "for loading alone"),
    ],
    "new_loader": [
        ("as PyTorch has it", "def written(dataset): return DataLoader(dataset, 128)", "num_workers: found 0"),
        ("in one order", """
            def written(dataset):
                return DataLoader(
                    dataset, 128, drop_last=True, num_workers=2, prefetch_factor=4, persistent_workers=True,
                    pin_memory=torch.cuda.is_available(),
                )
            """, "same order|different images"),
        ("the rest is kept", """
            def written(dataset):
                return DataLoader(
                    dataset, 128, shuffle=True, num_workers=2, prefetch_factor=4, persistent_workers=True,
                    pin_memory=torch.cuda.is_available(),
                )
            """, r"sizes \\[44, 128\\]"),
    ],
    "normalize": [
        ("parameters", """
            class written(nn.Module):
                def __init__(self, mean, std):
                    super().__init__()
                    self.mean, self.std = (nn.Parameter(torch.tensor(each).view(-1, 1, 1)) for each in (mean, std))
                def forward(self, images): return (images / 255 - self.mean) / self.std
            """, "would be trained"),
        ("attributes", """
            class written(nn.Module):
                def __init__(self, mean, std):
                    super().__init__()
                    self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))
                def forward(self, images): return (images / 255 - self.mean) / self.std
            """, "not saved"),
        ("no 255", """
            class written(nn.Module):
                def __init__(self, mean, std):
                    super().__init__()
                    self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
                    self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
                def forward(self, images): return (images - self.mean) / self.std
            """, "a number differs"),
        ("no channels", """
            class written(nn.Module):
                def __init__(self, mean, std):
                    super().__init__()
                    self.register_buffer("mean", torch.tensor(mean))
                    self.register_buffer("std", torch.tensor(std))
                def forward(self, images): return (images / 255 - self.mean) / self.std
            """, r"RuntimeError: .*\\(line 6 of your cell\\)"),
    ],
    "resize": [
        ("squashed", """
            def written(path, side):
                return Image.open(path).convert("RGB").resize((side, side))
            """, "a wide photo"),
        ("the longer side", """
            def written(path, side):
                photo = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
                photo.thumbnail((side, side))
                return photo
            """, "a wide photo of 640 × 400: expected .160, 100. pixels"),
        ("grey stays grey", """
            def written(path, side):
                photo = ImageOps.exif_transpose(Image.open(path))
                ratio = side / min(photo.size)
                return photo.resize((round(photo.width * ratio), round(photo.height * ratio)))
            """, "expected the mode RGB, found L"),
        ("lying", """
            def written(path, side):
                photo = Image.open(path).convert("RGB")
                ratio = side / min(photo.size)
                return photo.resize((round(photo.width * ratio), round(photo.height * ratio)))
            """, "held upright"),
    ],
    "packed_images": [
        ("opened at once", """
            class written(Dataset):
                def __init__(self, path, labels): self.images, self.labels = np.load(path, mmap_mode="r"), labels
                def __len__(self): return len(self.labels)
                def __getitems__(self, indices): return torch.from_numpy(self.images[indices]), self.labels[indices]
            """, "when the dataset is made"),
        ("pickled whole", """
            class written(Dataset):
                def __init__(self, path, labels): self.path, self.labels, self.images = path, labels, None
                def __len__(self): return len(self.labels)
                def __getitems__(self, indices):
                    if self.images is None: self.images = np.load(self.path, mmap_mode="r")
                    return torch.from_numpy(self.images[indices]), self.labels[indices]
            """, "9 MB on its way"),
        ("sorted", """
            class written(Dataset):
                def __init__(self, path, labels): self.path, self.labels = path, labels
                def __len__(self): return len(self.labels)
                def __getitems__(self, indices):
                    indices = sorted(indices)
                    images = np.load(self.path, mmap_mode="r")
                    return torch.from_numpy(images[indices]), self.labels[indices]
            """, "not those asked for, in order"),
        ("a list of pairs", """
            class written(Dataset):
                def __init__(self, path, labels): self.path, self.labels = path, labels
                def __len__(self): return len(self.labels)
                def __getitems__(self, indices):
                    images = np.load(self.path, mmap_mode="r")
                    return [(torch.tensor(images[index]), self.labels[index]) for index in indices]
            """, "expected the images and the labels of the batch, two tensors, found list"),
    ],
    "mean_loss": [
        ("reads each", """
            def written(loader, step):
                return np.mean([step(*batch).item() for batch in loader])
            """, r"in the loop \\(item\\)"),
        ("adds up as numbers", """
            def written(loader, step):
                total = 0.0
                for images, labels in loader: total += float(step(images, labels))
                return total / len(loader)
            """, "read in the loop"),
        ("prints", """
            def written(loader, step):
                losses = []
                for images, labels in loader:
                    losses.append(step(images, labels))
                    print(f"{losses[-1]:.2f}")
                return torch.stack(losses).mean().item()
            """, "read in the loop"),
        ("reads each at the end", """
            def written(loader, step):
                losses = [step(*batch) for batch in loader]
                return sum(loss.item() for loss in losses) / len(losses)
            """, "read 6 times"),
        ("a tensor", """
            def written(loader, step):
                return torch.stack([step(*batch) for batch in loader]).mean()
            """, "expected the mean as a float"),
    ],
    "channels_last_step": [
        ("only the images", """
            def written(model, optimizer, images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
                loss.backward()
                optimizer.step()
                return loss.detach()
            """, "expected the weights of the first layer in channels_last"),
        ("only the weights", """
            def written(model, optimizer, images, labels):
                model.to(memory_format=torch.channels_last)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                return loss.detach()
            """, "expected the images in channels_last"),
        ("permuted", """
            def written(model, optimizer, images, labels):
                model.to(memory_format=torch.channels_last)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images.permute(0, 2, 3, 1)), labels)
                loss.backward()
                optimizer.step()
                return loss.detach()
            """, "RuntimeError|strides"),
    ],
    "mixed_step": [
        ("clipped before they are divided", """
            def written(model, optimizer, scaler, images, labels):
                optimizer.zero_grad()
                with torch.autocast(images.device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            """, "divided by the factor before"),
        ("in float32", """
            def written(model, optimizer, scaler, images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            """, "to give bfloat16, found torch.float32"),
        ("no update", """
            def written(model, optimizer, scaler, images, labels):
                optimizer.zero_grad()
                with torch.autocast(images.device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
            """, "RuntimeError: unscale_|update"),
        ("not clipped", """
            def written(model, optimizer, scaler, images, labels):
                optimizer.zero_grad()
                with torch.autocast(images.device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            """, "clipped to a norm"),
    ],
    "three_in_one": [
        ("three calls", "def written(x, q, k, v): return q(x), k(x), v(x)", "one product .* found 3"),
        ("cut alike", """
            def written(x, query, key, value):
                weight = torch.cat([query.weight, key.weight, value.weight])
                return nn.functional.linear(x, weight).chunk(3, dim=-1)
            """, r"expected \\(32, 16\\), found \\(32, 19\\)"),
        ("no bias", """
            def written(x, query, key, value):
                weight = torch.cat([query.weight, key.weight, value.weight])
                return nn.functional.linear(x, weight).split([16, 16, 24], dim=-1)
            """, "result 1 differs"),
        ("copies of the weights", """
            def written(x, query, key, value):
                weight = torch.cat([each.weight.detach() for each in (query, key, value)])
                bias = torch.cat([each.bias for each in (query, key, value)])
                return nn.functional.linear(x, weight, bias).split([16, 16, 24], dim=-1)
            """, "would not learn"),
    ],
}  # fmt: skip
CASES = [(check, title, code, said) for check, cases in WRONG.items() for title, code, said in cases]


def run(source, **names):
    scope = NAMES | names | {"__name__": __name__}
    exec(compile(textwrap.dedent(source).strip(), "a cell", "exec"), scope)
    for each in list(scope.values()):
        if isinstance(each, type) and each.__module__ == __name__:
            globals()[each.__name__] = each  # so that it can be pickled, as a cell's can
    return scope


def cells(number):
    (path,) = (config.PROJECT / "notebooks").glob(f"{number}-*.ipynb")
    return nbformat.read(path, 4).cells


def test_each_check_has_three_wrong_answers():
    assert WRONG.keys() == set(LESSONS.values())
    assert all(len(cases) >= 3 for cases in WRONG.values())


@pytest.mark.parametrize(
    ("check", "title", "code", "said"), CASES, ids=[f"{check}, {title}" for check, title, *_ in CASES]
)
def test_a_wrong_answer_is_answered_with_what_was_found(check, title, code, said, capsys):
    assert getattr(checks, check)(run(code)["written"]) is False
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("Not yet: ")
    assert re.search(said.replace("\\\\", "\\"), printed), printed


@pytest.mark.parametrize("code", ["written = ...", "def written(a, b): ...", "def written():\n    ...",
    "class written(Dataset):\n    def __getitems__(self, indices): ..."])  # fmt: skip
def test_the_placeholder_is_no_answer(code, capsys):
    assert checks.packed_images(run(code)["written"]) is False
    assert capsys.readouterr().out.startswith("Nothing to check yet: ")


@pytest.mark.parametrize(("number", "check"), LESSONS.items())
def test_the_solution_of_the_notebook_is_right_and_its_placeholder_none(number, check, capsys):
    exercise = [cell for cell in cells(number) if "exercise" in cell.metadata.get("tags", [])]
    solution = [cell for cell in cells(number) if "solution" in cell.metadata.get("tags", [])]
    (asked,), (solved, *_) = exercise, solution
    assert f"checks.{check}(" in "".join(cell.source for cell in cells(number))
    (name,) = re.findall(r"^(?:def|class) (\w+)", asked.source, re.MULTILINE)
    assert getattr(checks, check)(run(asked.source)[name]) is False
    assert "Nothing to check yet" in capsys.readouterr().out
    code, _, asserted = solved.source.rpartition("\nassert ")
    assert asserted.startswith(f"checks.{check}({name})")
    assert getattr(checks, check)(run(code)[name]) is True
    assert capsys.readouterr().out.startswith("Right: ")


def test_an_error_names_the_line_of_the_cell(capsys):
    assert (
        checks.mean_loss(run("def written(loader, step):\n    for batch in loader:\n        step(batch)")["written"])
        is False
    )
    assert "TypeError" in (said := capsys.readouterr().out) and "(line 3 of your cell)" in said
