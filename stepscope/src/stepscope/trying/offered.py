"""Settings that may make a training script faster, by what a run of the script as it is has reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from stepscope import thresholds
from stepscope.base import machine
from stepscope.base.wording import counted, percent

Change = dict[str, dict[str, Any]]  # see `observe.settings`
Report = dict[str, Any]  # of one run: see `observe.trial`
OF_THE_LOADER = ("workers", "prefetch", "persistent", "pin", "order", "context")
OF_THE_STEP = ("threads", "fused", "precision", "channels_last", "benchmark", "modes", "compile")
GROUPS = (*OF_THE_LOADER, *OF_THE_STEP)


def waiting(seen: Report) -> float:
    """Return the share of the timed steps in which the loop waits for batches."""
    return float(sum(seen["waits"]) / sum(seen["durations"]))


def left_out(seen: Report) -> tuple[tuple[str, ...], str]:
    """Return the groups that can gain less than `thresholds.WORTH`, by the share of waiting, and why, in a sentence."""
    share = waiting(seen)
    if share > 1 - thresholds.WORTH:
        why = f"Settings of the step were not tried: the loop waits for batches for {percent(share)} of its time."
        return OF_THE_STEP, why
    # On a CPU, fewer workers may leave more of the cores to the step
    if share < thresholds.WORTH and (seen["device"] == "cuda" or not (seen["loader"] or {}).get("workers")):
        why = f"Settings of the loader were not tried: the loop waits for batches for {percent(share)} of its time."
        return OF_THE_LOADER, why
    return (), ""


def candidates(seen: Report, wanted: Sequence[str] | None = None) -> dict[str, Change]:
    """Return settings by their names. `wanted` are some of `GROUPS`; by default all that may help.

    By default compilation on a CPU, which takes minutes, is not tried, nor are the groups of `left_out`.
    """
    usual = [group for group in GROUPS if group != "compile" or seen["device"] == "cuda"]
    asked = [group for group in usual if group not in left_out(seen)[0]] if wanted is None else wanted
    offers = [*_of_the_loader(seen), *_of_the_step(seen)]
    found = {name: change for group, name, change in offers if group in asked}
    return found | (_of_shared_cores(seen) if {"workers", "threads"} <= set(asked) else {})


def _of_shared_cores(seen: Report) -> dict[str, Change]:
    """Return workers that leave their cores alone: PyTorch computes with as many threads fewer.

    On a CPU, workers that compute and threads that compute may slow each other. Then neither setting helps alone.
    """
    cores, loader = max(1, seen["cores"] // seen["here"]), seen["loader"]
    found: dict[str, Change] = {}
    if seen["device"] != "cpu" or not loader or loader["stream"]:
        return found
    for number in sorted({1, cores // 2, cores} - {0}):
        threads = max(1, cores - number)
        if number < _that_fit(seen) and threads < cores and (number, threads) != (loader["workers"], seen["threads"]):
            change = {"loader": {"num_workers": number} | _persistent(seen), "torch": {"threads": threads}}
            found[f"num_workers={number}, {counted(threads, 'thread')}"] = change
    return found


def _of_the_loader(seen: Report) -> Iterator[tuple[str, str, Change]]:
    loader = seen["loader"]
    if not loader:
        return
    workers = loader["workers"]
    persistent = _persistent(seen)
    cores = max(1, seen["cores"] // seen["here"])  # of each rank
    numbers = [0, *(2**power for power in range(12) if 2**power < cores), cores]
    if waiting(seen) > thresholds.MOSTLY_WAITING:  # items that wait do not need a core each
        numbers.append(2 * cores)
    for number in numbers:
        if number != workers and number < _that_fit(seen):
            change = {"num_workers": number} | (persistent if number else {})
            yield "workers", f"num_workers={number}", {"loader": change}
    if workers and loader["prefetch"] < thresholds.MORE_PREFETCHED:
        more = thresholds.MORE_PREFETCHED
        yield "prefetch", f"prefetch_factor={more}", {"loader": {"prefetch_factor": more}}
    if workers and persistent and not loader["persistent"]:
        yield "persistent", "persistent_workers=True", {"loader": persistent}
    if workers > 1 and loader["in_order"]:  # None: PyTorch before 2.6 has no such argument
        yield "order", "in_order=False", {"loader": {"in_order": False}}
    if workers and loader["context"] == "fork":
        yield "context", "forkserver", {"loader": {"multiprocessing_context": "forkserver"}}
    if seen["device"] == "cuda" and not loader["pinned"]:
        yield "pin", "pin_memory=True", {"loader": {"pin_memory": True}}


def _that_fit(seen: Report) -> float:
    """Return how many workers of each rank fit into memory."""
    return machine.available_memory() / thresholds.WORKER_BYTES / float(seen["here"])


def _persistent(seen: Report) -> dict[str, Any]:
    return {"persistent_workers": True} if seen["whole_epochs"] else {}  # otherwise an epoch's start is rare


def _of_the_step(seen: Report) -> Iterator[tuple[str, str, Change]]:
    cuda, single = seen["device"] == "cuda", seen["dtype"] == "float32" and not seen["autocasts"]
    modern = cuda and seen["capability"][0] >= 8  # Ampere (A100) or later has TF32 and bfloat16
    for threads in sorted({psutil.cpu_count(logical=False) or 1, seen["cores"]} - {seen["threads"]}):
        if not cuda:
            yield "threads", f"{threads} threads", {"torch": {"threads": threads}}
    if any(each["fused"] for each in seen["optimizers"]):
        yield "fused", "fused=True", {"optimizer": {"fused": True}}
    if single and modern and not seen["tf32"]:
        yield "precision", "TF32", {"torch": {"tf32": True}}
    if single and (modern or not cuda):
        yield "precision", "bfloat16", {"network": {"autocast": "bfloat16"}}
    if single and cuda:
        yield "precision", "float16", {"network": {"autocast": "float16"}}
    if seen["images"] and seen["network"] not in _FIXED_STRIDES:
        yield "channels_last", "channels_last", {"network": {"channels_last": True}}
    if seen["images"] and cuda and not seen["benchmark"]:
        yield "benchmark", "cudnn.benchmark", {"torch": {"benchmark": True}}
    for mode in ("deterministic", "anomaly"):
        if seen[mode]:
            yield "modes", f"{mode} mode off", {"torch": {mode: False}}
    yield "compile", "torch.compile", {"network": {"compile": True}}


def joined(changes: Sequence[Change]) -> Change:
    """Return one change with the parts of several changes; of two values for one setting, the first one counts."""
    together: Change = {}
    for change in changes:
        for part, values in change.items():
            together[part] = values | together.get(part, {})
    return together


def lines(change: Change, seen: Report) -> list[str]:
    """Return what to write into the script for a change, each with the script's own line if it is known."""
    written = []
    if values := change.get("loader"):
        arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
        written.append((f"{seen['loader']['kind']}(…, {arguments})", seen["loader"]["line"]))
    if values := change.get("optimizer"):
        arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
        written += [(f"{each['name']}(…, {arguments})", each["line"]) for each in seen["optimizers"] if each["fused"]]
    of_torch = change.get("torch", {})
    if "threads" in of_torch:
        written.append((f"torch.set_num_threads({of_torch['threads']})", ""))
    written += [(text, "") for name, text in _OF_TORCH.items() if name in of_torch]
    network = change.get("network", {})
    if dtype := network.get("autocast"):
        scaled = ", and a torch.amp.GradScaler" if dtype == "float16" else ""
        written.append((f'with torch.autocast("{seen["device"]}", torch.{dtype}):', f"forward pass and loss{scaled}"))
    if network.get("channels_last"):
        written.append(("model.to(memory_format=torch.channels_last)", "and its images, too"))
    if network.get("compile"):
        written.append(("model.compile()", ""))
    return [f"{text}  # {comment.partition(': ')[0]}" if comment else text for text, comment in written]


_FIXED_STRIDES = ("DistributedDataParallel", "FullyShardedDataParallel")  # have laid out the gradients already
_OF_TORCH = {
    "tf32": 'torch.set_float32_matmul_precision("high"); torch.backends.cudnn.allow_tf32 = True',
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "deterministic": "torch.use_deterministic_algorithms(False)",
    "anomaly": "torch.autograd.set_detect_anomaly(False)",
}
