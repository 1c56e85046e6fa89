"""Runs 1, 3, 4 and 9: the training step of ResNet-50, as notebooks 09 to 13 have it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import config, training
from helpers.training import compiling, footprint, models
from tests.gpu import materials, measuring
from tests.gpu.measuring import Figures, Run, Steps

FORMATS = ("float32", "TF32", "bfloat16", "float16")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def workload(small: bool) -> tuple[int, int, int]:
    """Return images of a batch, their side in pixels, and the steps of a round."""
    return (4, 32, 2) if small else (256, 224, 10)


def unchanged(model: nn.Module) -> nn.Module:
    """Return the model."""
    return model


def new_step(
    side: int,
    name: str,
    layout: torch.memory_format = torch.channels_last,
    change: Callable[[nn.Module], nn.Module] = unchanged,
    **options: object,
) -> training.TrainingStep:
    """Return a training step in a number format; TF32 is a setting, see `training.set_tf32`.

    `change` gets the network and returns the one to train; `options` are those of ``torch.optim.SGD``.
    """
    training.seed_everything(config.SEED)
    model = models.resnet50(side).to("cuda", memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **options)
    autocast = getattr(torch, name) if name.endswith("float16") else None
    scaler = torch.amp.GradScaler("cuda", enabled=name == "float16")
    return training.TrainingStep(change(model), optimizer, autocast, scaler, layout)


def formats(run: Run) -> None:
    """Measure four number formats in two layouts."""
    images, side, count = workload(run.small)
    loader = [measuring.batch(images)]

    def variant(name: str, layout: torch.memory_format) -> Steps:
        return Steps(training.WithTF32(new_step(side, name, layout), name == "TF32"), loader, count)

    variants = {f"{name}, {layout}": partial(variant, name, LAYOUTS[layout]) for layout in LAYOUTS for name in FORMATS}
    run.compare("formats", variants, traced=variants)


def fewer_launches(run: Run) -> None:
    """Measure what fewer launches and compilation gain, and the seconds of the first compiled step."""
    images, side, count = workload(run.small)
    batch = measuring.batch(images)
    training.set_tf32(True)

    def eager(name: str, **options: object) -> Steps:
        return Steps(new_step(side, name, **options), [batch], count)

    def as_notebook_09() -> Steps:
        step = new_step(side, "float32", torch.contiguous_format)
        return Steps(training.WithTF32(step, False), [batch], count)

    def compiled(name: str, mode: str | None = None) -> Steps:
        step = new_step(side, name, change=partial(torch.compile, mode=mode), fused=True)
        return Steps(step, [batch], count, first_step(step, *batch))

    def graph(name: str) -> Steps:  # without a scaler, which `training.graphed` does not take
        step = replace(new_step(side, name, fused=True), scaler=torch.amp.GradScaler(enabled=False))
        return Steps(training.graphed(step, *batch), [batch], count)

    def again() -> Figures:  # as in another process: what was compiled is on the disk only
        torch.compiler.reset()
        return first_step(new_step(side, "bfloat16", change=torch.compile, fused=True), *batch)

    with compiling.empty_cache():
        for name in ("bfloat16", "float16"):
            variants = {
                "eager": partial(eager, name),
                "fused": partial(eager, name, fused=True),
                "compile": partial(compiled, name),
                "reduce-overhead": partial(compiled, name, "reduce-overhead"),
                "graph": partial(graph, name),
            }
            extra = {"float32, contiguous": as_notebook_09} if name == "bfloat16" else {}
            run.compare(name, variants | extra, traced=["eager", "compile"])
            torch.compiler.reset()
        run.compare("bfloat16, from the compiler's cache", {"compile": lambda: again}, rounds=1)
        for name in ("bfloat16", "float16") if not run.small else ():  # last, since it takes minutes
            tuned = partial(compiled, name, "max-autotune")
            run.compare(f"{name}, tuned", {"eager": partial(eager, name), "max-autotune": tuned})
            torch.compiler.reset()


def first_step(step: Callable, *batch: torch.Tensor) -> Figures:
    """Return the seconds of a first step, in which a compiled model is compiled."""
    start = time.perf_counter()
    step(*batch)
    torch.cuda.synchronize()
    return {"first_step_s": time.perf_counter() - start}


def small_step(run: Run) -> None:
    """Measure a launch-bound step: 16 images of 32 × 32 pixels; and a launch before and after a profile."""
    images, count = (4, 2) if run.small else (16, 100)
    batch = measuring.batch(images)
    training.set_tf32(True)
    new = partial(new_step, 32, "bfloat16", fused=True)

    def compiled() -> Steps:
        step = new(change=torch.compile)
        return Steps(step, [batch], count, first_step(step, *batch))

    def after_a_profile() -> Callable[[], Figures]:
        with torch.profiler.profile():
            launch_us()
        return launch_us

    variants = {
        "eager": lambda: Steps(new(), [batch], count),
        "graph": lambda: Steps(training.graphed(new(), *batch), [batch], count),
        "compile": compiled,
    }
    run.compare("launch", {"before a profile": lambda: launch_us})
    run.compare("small step", variants, traced=["eager", "graph"])
    run.compare("launch", {"after a profile": after_a_profile})
    run.compare("small step after a profile", {"eager": variants["eager"]})


def launch_us(launches: int = 500, repeats: int = 40) -> Figures:
    """Return the host's microseconds for a launch, the median of `repeats`: an addition, without waiting for it."""
    number, took = torch.zeros(1, device="cuda"), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):  # fewer than the queue of a stream holds, so that the host does not wait
            number.add_(1)
        took.append((time.perf_counter() - start) / launches * 1e6)
    torch.cuda.synchronize()
    return {"launch_us": statistics.median(took)}


def memory(run: Run) -> None:
    """Measure time and peak of the memory where activations are kept, and where they are recomputed."""
    images, side, count = workload(run.small)
    batch = measuring.batch(images)
    on_device = [each.cuda() for each in batch]
    recomputed = materials.recipes().Recomputed
    training.set_tf32(True)

    def stages(model: nn.Module, wrap: Callable[[nn.Module], nn.Module] = recomputed) -> nn.Module:
        for name in ("layer1", "layer2", "layer3", "layer4"):
            setattr(model[2], name, wrap(getattr(model[2], name)))
        return model

    def blocks(model: nn.Module) -> nn.Module:
        return stages(model, lambda stage: nn.Sequential(*map(recomputed, stage)))

    def variant(name: str, change: Callable[[nn.Module], nn.Module]) -> Callable[[], Figures]:
        step = new_step(side, name, torch.contiguous_format, change, momentum=0.9)  # as notebook 13 has it
        steps, calculated = Steps(step, [batch], count), peak_mb(images, side, step.autocast, change)

        def measure() -> Figures:
            figures = steps()
            state = [each["momentum_buffer"] for each in step.optimizer.state.values()]
            held = sum(each.nbytes for each in (*step.model.state_dict().values(), *state))
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(*on_device)
            mb = (torch.cuda.max_memory_allocated() - before + held) / 1e6
            return figures | {"peak_mb": mb, "calculated_mb": calculated, "peak_to_calculated": mb / calculated}

        return measure

    ways = {"all kept": unchanged, "4 stages recomputed": stages, "16 blocks recomputed": blocks}
    for name in ("TF32", "bfloat16"):
        run.compare(name, {way: partial(variant, name, change) for way, change in ways.items()})


def peak_mb(images: int, side: int, autocast: torch.dtype | None, change: Callable[[nn.Module], nn.Module]) -> float:
    """Return the calculated peak of a step's memory in MB, as notebook 13 calculates it: the step is not computed."""
    with FakeTensorMode():
        model = change(models.resnet50(side))
        step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), autocast)
        photos, classes = torch.empty(images, 3, 32, 32, dtype=torch.uint8), torch.zeros(images, dtype=torch.long)
        return footprint.peak_bytes(model, step.optimizer, lambda: step(photos, classes)) / 1e6
