"""Facts as rows of the evidence: name and value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from stepscope import thresholds
from stepscope.base.wording import PLAIN_NAMES, counted, distinct_milliseconds, milliseconds, percent, printable
from stepscope.facts import Facts
from stepscope.facts.device import Device
from stepscope.facts.hazards import Compilation
from stepscope.facts.host import Framework, Host, Work
from stepscope.facts.loader import Loader
from stepscope.facts.loop import Card, GpuMemory, Loop, Machine, Step, Trend
from stepscope.facts.profile import Profile
from stepscope.rules.loader import Loading, at


def rows(facts: Facts, profile: Profile | None, loading: Loading) -> Iterator[tuple[str, str]]:
    """Yield the evidence of a loop, or of a trace alone."""
    if facts.loop is not None:
        yield "stopwatch", _stopwatch(loading)
        yield from _memory(facts.loop.trend)
    if facts.machine is not None and facts.machine.memory is not None:
        yield "memory of the GPU", _memory_of_gpu(facts.machine.memory)
    if facts.machine is not None and facts.machine.card is not None:
        yield "clock of the GPU", _clock(facts.machine.card)
    if profile is not None:
        yield from _profile(profile, facts.device, facts.host)
    if facts.host is not None and facts.host.framework.work.share >= thresholds.WORTH:
        yield "framework", _framework(facts.host.framework)
    if facts.loader is not None and facts.machine is not None:
        yield from _loader(facts.loader, facts.machine)
    yield from _compilation(facts.compilation)


def _stopwatch(loading: Loading) -> str:
    loop = loading.loop
    which = (
        f"mean of {len(loop.steps)} timed steps"
        + _range(loop.usual)
        + ", without the first of each epoch" * (loop.epoch_steps != 1)
    )
    if loop.hiccup_ms:
        which += f"; a single long step of {milliseconds(loop.hiccup_ms)} counts as the next longest"
    step, waits = milliseconds(loading.step_ms), milliseconds(loading.wait_ms)
    clock = f"{step} a step ({which}), {waits} of it waiting for a batch"
    whole = milliseconds(loading.whole_ms)
    if whole != step:
        parts = ["beginning epochs"] * bool(loading.begin_ms)
        parts += ["work between epochs"] * bool(loop.pauses.ms_per_step)
        parts += ["the work of long steps"] * loop.long.distinct
        clock += f"; the gains refer to {whole}, with {' and '.join(parts)}"
    return clock


def _range(steps: Sequence[Step]) -> str:
    """Return the range of few durations, which shows how sure their mean is; "" for many."""
    if len(steps) >= thresholds.FEW_STEPS:
        return ""
    times = [step.duration_ms for step in steps]
    least, most = distinct_milliseconds(min(times), max(times))
    return f" of {least} to {most}"


def _memory(trend: Trend) -> Iterator[tuple[str, str]]:
    keeper = f"{trend.kept} keeps what a step makes" if trend.kept else "A list, dict or attribute may keep its tensors"
    kept = (
        f"in each step. {keeper}: keep a number, such as loss.item(), or a tensor without its graph: output.detach()."
    )
    if trend.grown_bytes:
        yield "memory", f"the script's own memory grew by {trend.grown_bytes / 1e6:.2g} MB {kept}"
    if trend.grown_gpu_bytes:
        yield "memory of the GPU", f"its tensors grew by {trend.grown_gpu_bytes / 1e6:.2g} MB {kept}"


def _memory_of_gpu(memory: GpuMemory) -> str:
    gigabytes = [f"{size / 1e9:.3g}" for size in (memory.allocated_bytes, memory.reserved_bytes, memory.total_bytes)]
    text = "at most {} GB of tensors, {} GB with what the allocator keeps, of {} GB".format(*gigabytes)
    if memory.retries:
        return f"{text}; {counted(memory.retries, 'time')} it was full, and waited for the GPU to free what it kept"
    times = thresholds.USABLE_MEMORY * memory.free_bytes / max(memory.allocated_bytes, 1)  # other processes have theirs
    many = f"{int(times)} times as large" if times < 10 else "10 times as large, and more"
    return text if times < 2 else f"{text}: try batches {many}"


USUAL_LIMITS = ("its power limit", "a lack of work")


def _clock(card: Card) -> str:
    power = f", at {card.power_w:,.0f} of {card.limit_w:,.0f} W" if card.power_w and card.limit_w else ""
    held = f"; held down by {' and '.join(card.limits)}" if card.limits else ""
    return f"{card.clock_mhz:,.0f} of {card.most_mhz:,.0f} MHz{power}{held}"


def slowed(card: Card) -> Iterator[str]:
    """Yield sentences on what makes the times of this GPU unusual: neither its power limit nor a lack of work does."""
    unusual = [limit for limit in card.limits if limit not in USUAL_LIMITS]
    if unusual:
        share = percent(card.clock_mhz / max(card.most_mhz, 1.0))
        yield f"how fast the GPU is otherwise: {' and '.join(unusual)} held its clock at {share} of the highest"
    if card.others:
        yield (
            f"how exact the gains are: {counted(card.others, 'other process')} had this GPU, too. "
            "Diagnose again when it is free."
        )


def _profile(profile: Profile, device: Device | None, host: Host | None) -> Iterator[tuple[str, str]]:
    stall = f"; a single long step of {milliseconds(profile.stall_ms)} is left out"
    if profile.begins_epoch:
        stall += ": an epoch begins in it, and starts its workers anew unless DataLoader(…, persistent_workers=True)"
    mean = f"{profile.steps} recorded, on average {milliseconds(profile.step_ms)}"
    yield "steps", mean + stall * (profile.stall_ms > 0)
    parts = shares(profile, device, host).items()
    yield "in a step", ", ".join(f"{name} {percent(share)}" for name, share in parts)
    if device is None:
        yield "accelerator", "none in the trace: all times are of the host"
        return
    for each in device.accelerators:
        columns = {
            "kernels run": each.utilization, "SM efficiency": each.sm_efficiency, "Tensor Cores": each.tensor_cores
        }  # fmt: skip
        known = [f"{name} {percent(share)}" for name, share in columns.items() if share is not None]
        if each.name is not None:
            known.append(printable(each.name))
        yield f"GPU {each.number}", ", ".join(known)


def shares(profile: Profile, device: Device | None, host: Host | None) -> dict[str, float]:
    """Return where the time of a recorded step goes: names and shares of the step, without parts that take no time."""
    parts = {PLAIN_NAMES[name]: share for name, share in profile.shares.items()}
    if device is None and host is not None and host.phases:
        parts = {"loading": profile.loading, **host.phases}
        parts["other"] = max(0.0, 1 - sum(parts.values()))
    return {name: share for name, share in parts.items() if share >= 5e-4}


def _framework(framework: Framework) -> str:
    """Return the work of the package that runs the loop: larger batches need it less often."""
    parts = "".join(f", {printable(each.name)} {percent(each.share)} of it" for each in framework.parts[:3])
    return (
        f"{printable(framework.name)} itself works for {percent(framework.work.share)} of the sampled steps, between "
        f"the operators of the training, and no less with a smaller batch{parts}"
    )


def _loader(loader: Loader, machine: Machine) -> Iterator[tuple[str, str]]:
    settings, items = loader.settings, loader.items
    if settings is not None:
        names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
        values = ", ".join(f"{name}={getattr(settings, name)}" for name in names)
        yield "DataLoader", f"{settings.dataset}, {values}; {counted(machine.cores, 'core')}"
    if items is not None:
        parts = sorted(items.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {percent(share)}" for name, share in parts if share >= 0.005)
        took = f"{milliseconds(items.ms)} in one process, {milliseconds(items.cpu_ms)} of it CPU time"
        yield "an item", f"{took}; {shares} (mean of {items.count:,} items)"
    if loader.generators and settings is not None:
        text = (
            f"Each of the {settings.num_workers} workers has an equal copy of {', '.join(loader.generators)}: all "
            "workers draw the same numbers, unless an item seeds its generator. Create the generator in "
            "worker_init_fn, for example np.random.default_rng(torch.initial_seed())."
        )
        yield "random numbers", text
    if loader.growth is not None:
        large = ", ".join(f"{each.place} ({each.count:,} objects)" for each in loader.growth.objects)
        text = (
            f"grew by {loader.growth.grown_bytes / 1e6:.0f} MB in {counted(loader.growth.steps, 'step')}, probably by "
            f"reading {large}: reading an object changes its reference count, and the worker then copies the memory "
            "page that it shared with its parent. The elements of an array have no reference counts."
        )
        yield "workers' memory", text


def _compilation(compilation: Compilation) -> Iterator[tuple[str, str]]:
    if compilation.again:
        why = f", whose guard failed: {compilation.why}" if compilation.why else ""
        text = (
            f"{counted(compilation.again, 'time')}, {compilation.seconds:.1f} s in total, mostly the function at "
            f"{compilation.at}{why}. After {compilation.limit} recompilations "
            f"PyTorch runs the function without compiling it.{_for_changing_sizes(compilation.why)}"
        )
        yield "compiled again", text
    if compilation.graph_breaks:
        places = ", ".join(compilation.graph_breaks)
        text = f"at {places}. Fewer operators are fused around a break. With fullgraph=True a break is an error."
        yield "graph breaks", text


def _for_changing_sizes(why: str) -> str:
    """Return the change for the failed guard as a sentence; "" if the guard is not about a size."""
    found = re.search(r"tensor '(.*\w.*)' (?:size|stride) mismatch at index (\d+)", why)
    if found is None:
        return ""
    name, index = re.findall(r"\w+", found[1])[-1], int(found[2])
    drops = ", or set drop_last=True if only the last batch is smaller" if index == 0 else ""
    return (
        f" The size of dimension {index} changes: torch.compile(…, dynamic=True), or without dynamic=False "
        f"torch._dynamo.mark_dynamic({name}, {index}) before the first call{drops}."
    )


def doubt(profile: Profile) -> str | None:
    """Return why the profile allows no verdict; None if it allows one."""
    least = thresholds.LEAST_STEPS - profile.in_process  # without workers, all steps wait alike
    if profile.steps < least:
        return (
            f"The trace has {counted(profile.steps, 'step')}, and a verdict needs {least} or more: "
            "with n workers, only every n-th step waits. Record the trace with schedule(…, active=8)."
        )
    if profile.on_device:
        return profile.lost_kernels or None
    if profile.unknown_accelerators:
        names = ", ".join(profile.unknown_accelerators)
        return f"The trace has events of an accelerator that stepscope does not know: {names}."
    if profile.without_kernels:
        return (
            "The network ran on a GPU, but the trace has no kernels. Record the trace with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    return None


def unseen(facts: Facts) -> str | None:
    """Return why no verdict is possible if an accelerator trains whose time stepscope cannot see; None if none does."""
    device = facts.optimizer.device
    if device == "cuda" and facts.profile is not None and not facts.profile.on_device:
        return (
            "The weights are on a GPU, and no kernel is in the trace: PyTorch's profiler could not record the GPU, "
            "because CUPTI is missing, not permitted, or in use by another profiler. All times are of the host, which "
            "may wait for the GPU in any line, and for a batch while the GPU computes."
        )
    if device in ("", "cpu", "cuda"):
        return None
    return (
        f"The weights are on an accelerator of the type {device}, whose time stepscope does not see: all times are of "
        "the host, which may wait for the accelerator in any line, and for a batch while the accelerator computes."
    )


def traced(loop: Loop) -> str | None:
    """Return why the times allow no verdict if the script profiles or traces itself; None if it does not."""
    if not loop.tracers:
        return None
    return (
        f"The script runs {' and '.join(loop.tracers)}, which slows the steps, and changes the share of each part. Run "
        "the script without, or for a few steps only, and diagnose again."
    )


def long_steps(loading: Loading) -> str | None:
    """Return why something may be wrong if some steps take far longer than most, with the same work; None if not."""
    long = loading.loop.long
    if long.distinct or long.once or long.trains or not long.count or long.mean_ms < thresholds.STALL * long.usual_ms:
        return None
    if long.ms_per_step < thresholds.WORTH * loading.whole_ms:
        return None
    if long.count == 1:
        return (
            f"One of {long.every:.0f} steps took {milliseconds(long.mean_ms)}, and the median step "
            f"{milliseconds(long.usual_ms)}: a stall of the machine, or work that few steps do. Time more steps."
        )
    often = f"About one in {long.every:.3g} steps takes" if long.every >= 2 else "Most of the later steps take"
    return (
        f"{often} {milliseconds(long.mean_ms)}, and the median step {milliseconds(long.usual_ms)}, in the same lines "
        "of code. Are the batches of the long steps larger?"
    )


def recomputed(facts: Facts) -> str | None:
    """Return why a step may be slower than it must be if activation checkpointing repeats forward passes, or None."""
    share = facts.host.recomputed if facts.host else 0.0
    if share < thresholds.WORTH:
        return None
    return (
        f"Activation checkpointing repeats forward passes for {percent(share)} of a step. This is only needed if the "
        "memory does not suffice: try the training without it, such as gradient_checkpointing=False."
    )


def compiled_again(facts: Facts) -> str | None:
    """Return why the loop may take longer than its timed steps if functions are compiled again and again, or None."""
    found = facts.compilation
    if found.again < thresholds.COMPILED_AGAIN:
        return None
    return (
        f"torch.compile compiled functions again {counted(found.again, 'time')}, for {found.seconds:.1f} s, mostly the "
        f"function at {found.at}.{_for_changing_sizes(found.why)}"
    )


def evaluated(facts: Facts) -> str | None:
    """Return why a step may be slower than it must be if a network runs in it without training, or None."""
    work = facts.host.evaluated if facts.host else Work()
    if work.share < thresholds.WORTH:
        return None
    return (
        f"A network runs without training for {percent(work.share)} of a step{at(work.line)}. "
        "A step needs a teacher network, but no second forward pass for an accuracy: the outputs of training are there."
    )


def few_threads(facts: Facts, loading: Loading) -> str | None:
    """Return why a step may be slower than it must be if PyTorch has few threads and cores are free, or None."""
    if facts.machine is None or facts.machine.cuda or facts.trials.threads:
        return None
    threads, cores = facts.modes.threads, facts.machine.cores
    cores = min(cores, facts.modes.physical_cores or cores)
    worked_ms = loading.loop.cpu_ms + loading.items.batch_cpu_ms * bool(loading.workers)
    if not 0 < threads < cores or worked_ms > thresholds.USED_CORES * cores * loading.step_ms:
        return None
    return (
        f"PyTorch computes with {counted(threads, 'thread')}, and the machine has {counted(cores, 'core')}: try "
        f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores} as an environment variable."
    )


def queued(profile: Profile) -> str | None:
    """Return what is not known of a GPU that seems idle with work in its queue; None if that takes little time."""
    if profile.queued < thresholds.WORTH:
        return None
    return (
        f"what the GPU does for {percent(profile.queued)} of the time: no kernel is recorded, although the host has "
        "launched the next one. The trace lacks kernels of CUDA graphs, or a stream waits for another one. Record some "
        "steps without CUDA graphs."
    )


def unexplained(profile: Profile) -> str | None:
    """Return why something may be wrong even if nothing is found, or None."""
    if profile.on_device or profile.shares["Other"] < thresholds.UNEXPLAINED:
        return None
    return (
        f"For {percent(profile.shares['Other'])} of the time the trace shows neither operators nor loading: the time "
        "goes to Python, to other libraries, or to an accelerator that PyTorch's profiler does not record. Profile the "
        "script with  py-spy record -o flames.svg -- python train.py  or  python -m cProfile -s tottime train.py."
    )
