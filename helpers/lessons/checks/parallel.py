"""The check of notebook 16's first exercise: a training loop of one process that becomes data parallel.

``torchrun`` starts this file as two ranks. Each rank runs the reader's function and notes the images and the gradients
of each step, what is printed, and the losses. The check then calculates the same steps in one process.
"""

import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from helpers.lessons.checks.answering import Unwritten, Wrong, answered, expect, expect_written, imported, slip
from helpers.training import launching

IMAGES, BATCH, EPOCHS, RANKS = 96, 16, 3, 2
STEPS = IMAGES // BATCH  # in an epoch
LIMIT = 60.0  # seconds; a right answer takes 10 on two busy cores


@answered
def data_parallel(file: Path) -> str:
    """Notebook 16: a file with ``train(dataset, model, epochs, batch)``, which several ranks call together.

    ``batch`` is the number of images of all ranks in a step. In each epoch rank 0 prints a line that ends with the
    loss, in nats: the mean over the steps of the epoch and over all ranks.
    """
    expect_written(imported(file).train)
    ranks = _ranks(file)
    if all(rank["world"] == 1 for rank in ranks):
        raise Unwritten
    first, second = (rank["images"] for rank in ranks)
    counts = [len(images) for images in (first[0], second[0])]
    expect(sum(counts) == BATCH, f"{BATCH} images of all ranks", f"{counts[0]} + {counts[1]}", "in a step",
           "A rank's loader takes batch divided by the number of ranks.")  # fmt: skip
    seen = [{image for images in steps[:STEPS] for image in images} for steps in (first, second)]
    twice = len(seen[0] & seen[1])
    expect(not twice, "each image on one rank", f"{twice} images on both", "in the first epoch", "Who divides them?")
    expect(len(first) == EPOCHS * STEPS, f"{EPOCHS * STEPS} steps", len(first), f"in {EPOCHS} epochs")
    expect(first[:STEPS] != first[STEPS : 2 * STEPS], "another order", "the order of the first", "in the second epoch",
           "A sampler learns from its loop which epoch begins.")  # fmt: skip
    losses = _compare(ranks, [a + b for a, b in zip(first, second, strict=True)])
    printed = [rank["printed"].splitlines() for rank in ranks]
    expect(not printed[1], "lines of rank 0 only", f"{len(printed[1])} lines of rank 1, too", "printed")
    expect(len(printed[0]) == EPOCHS, f"{EPOCHS} lines of rank 0", len(printed[0]), "printed")
    for epoch, (line, loss) in enumerate(zip(printed[0], losses, strict=True)):
        numbers = re.findall(r"\d+\.\d+", line)
        expect(numbers, "a line that ends with the loss", repr(line), "printed")
        slips = {"That is the sum over the ranks.": RANKS * loss, "That is rank 0's own loss.": ranks[0]["own"][epoch]}
        near = abs(float(numbers[-1]) - loss) < 6e-4
        expect(near, f"{loss:.4f}", numbers[-1], f"the loss of epoch {epoch}", slip(float(numbers[-1]), slips))
    return f"{RANKS} ranks learn the same as one process in {len(first)} steps, and rank 0 prints the loss of all."


def _ranks(file: Path) -> list[dict[str, Any]]:
    """Return what each of the ranks noted."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            launching.torchrun(__file__, file, folder, ranks=RANKS, timeout=LIMIT, quiet=True)
        except launching.JobFailed as failed:
            became = str(failed).splitlines()[0].removeprefix(f"{__file__}: ")
            lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', str(failed))
            raise Wrong(became + (f" (line {lines[-1]} of what you wrote)" if lines else "")) from None
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(RANKS)]


def _compare(ranks: list[dict[str, Any]], steps: list[list[int]]) -> list[float]:
    """Raise `Wrong` unless all ranks have the gradients of one process; return this process's mean loss of an epoch."""
    (images, labels), model = _data().tensors, _model(seed=0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for number, chosen in enumerate(steps):
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        own = _gradients(optimizer)
        for rank, noted in enumerate(ranks):
            found, where = noted["gradients"][number], f"step {number}, rank {rank}"
            hint = "Does each rank begin with the weights of rank 0, and does backward average the gradients?"
            expect(torch.allclose(found, own, 1e-3, 1e-5), "the gradients of one process", "others", where, hint)
        optimizer.step()
        losses.append(loss.item())
    return [sum(losses[start : start + STEPS]) / STEPS for start in range(0, len(losses), STEPS)]


def _data() -> TensorDataset:
    """Return images of 4 numbers; the first is the number of the image, so the model's input says which they are."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 4, generator=generator)
    labels = (images[:, 1] > 0).long() + (images[:, 2] > 0)
    images[:, 0] = torch.arange(IMAGES) / IMAGES
    return TensorDataset(images, labels)


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _gradients(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


def _run_rank(train: Callable, path: Path, rank: int) -> None:
    """Run the reader's function as one rank, with weights that are this rank's own, and save what it did."""
    noted: dict[str, Any] = {"images": [], "gradients": [], "world": 1}
    model, own = _model(seed=rank), []

    def before_step(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        noted["gradients"].append(_gradients(optimizer))
        noted["world"] = dist.get_world_size() if dist.is_initialized() else 1

    def after_forward(module: nn.Module, arguments: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
        images = (arguments[0][:, 0] * IMAGES).round().int().tolist()
        noted["images"].append(images)
        own.append(nn.functional.cross_entropy(scores.detach(), _data().tensors[1][images]).item())

    model.register_forward_hook(after_forward)
    register_optimizer_step_pre_hook(before_step)
    with redirect_stdout(io.StringIO()) as printed:
        train(_data(), model, EPOCHS, BATCH)
    noted["printed"] = printed.getvalue()
    noted["own"] = [sum(own[start : start + STEPS]) / STEPS for start in range(0, len(own), STEPS)]
    torch.save(noted, path)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    number = int(os.environ["RANK"])
    _run_rank(imported(Path(sys.argv[1])).train, Path(sys.argv[2], f"{number}.pt"), number)
