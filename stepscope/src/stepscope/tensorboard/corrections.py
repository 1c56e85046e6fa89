"""Corrects TensorBoard's profiler tab in memory, so that it is right on today's traces and draws without internet.

The plugin, torch-tb-profiler, was removed from its repository; this module corrects 0.4.3, its last release. Neither
the plugin's files nor the traces change. The docstring of each correction states the fault that it fixes. A function in
`CORRECTIONS` replaces one of the plugin's functions, which it gets as its first argument. A function in `OF_TRACES`
takes a trace, parsed from its JSON, and returns its corrected events; `write_copies` writes such corrected traces for a
plain TensorBoard.
"""

import functools
import gc
import gzip
import importlib
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stepscope.base import staging
from stepscope.base.staging import TargetExists
from stepscope.tensorboard import distributed, pages
from stepscope.traces import TraceError, columns, files, kernel_properties

Event = files.Json

PLUGIN, CORRECTED_VERSION = "torch-tb-profiler", "0.4.3"


class PackageMissing(ModuleNotFoundError):
    """This Python lacks a package that the profiler tab needs, or has another version than the corrected one."""


def check_packages() -> None:
    """Raise PackageMissing unless the packages of stepscope's extra `tab` are here."""
    for package in ("tensorboard", PLUGIN, "viztracer"):
        versions = [each.version for each in metadata.distributions(name=package)]
        if not versions or (package == PLUGIN and versions[0] != CORRECTED_VERSION):
            lacking = f"{package} {CORRECTED_VERSION}" if package == PLUGIN else package
            install = f"{sys.executable} -m pip install tensorboard {PLUGIN}=={CORRECTED_VERSION} viztracer"
            raise PackageMissing(f"{sys.executable} lacks {lacking}. Install it:  {install}", name=package)


@functools.cache
def apply() -> None:
    """Apply all corrections to the plugin in this process, once."""
    for place, correction in CORRECTIONS.items():
        replace(place, correction)


def replace(place: str, correction: Callable[..., object]) -> None:
    """Replace a function of the plugin, ``module:name`` or ``module:Class.name``, by a correction."""
    module, _, names = place.partition(":")
    *owners, name = names.split(".")
    owner = importlib.import_module(f"torch_tb_profiler.{module}")
    for part in owners:
        owner = getattr(owner, part)
    stock = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: correction(stock, *arguments, **options))


def correct_the_data(stock: Callable[..., None], self: Any, worker: str, span: str, trace: files.Json) -> None:
    """All views: the plugin misreads today's traces; each function in `OF_TRACES` states a fault."""
    stock(self, worker, span, correct(trace))


def leave_out_what_is_being_recorded(stock: Callable[..., list[str]], self: Any) -> list[str]:
    """Runs: an unfinished recording appears as a separate run, which then stays."""
    return [folder for folder in stock(self) if not staging.is_staging(Path(folder))]


def end_loading_for_certain(stock: Callable[..., None], self: Any, run_dir: str) -> None:
    """Runs: the page loads for ever if a thread that loads a run ends before the plugin has listed the thread."""
    while threading.current_thread() not in self._load_threads:
        time.sleep(0.001)
    stock(self, run_dir)


def know_tensor_core_kernels(stock: Callable[..., bool], kernel: str) -> bool:
    """GPU Summary, Operator, Kernel: the plugin misses the Tensor-Core kernels of Hopper, and many of Ampere's."""
    return kernel_properties.uses_tensor_cores(kernel)


def know_todays_operators(stock: Callable[..., bool], operator: str) -> bool:
    """Operator, recommendations, CUDA: convolutions' backward pass, and attention, do not count for Tensor Cores."""
    return operator.removeprefix("aten::") in TENSOR_CORE_OPERATORS or stock(operator)


# From autocast's list in `ATen/autocast_mode.h` of torch 2.15, with the operators that the listed operators call
TENSOR_CORE_OPERATORS = """
    convolution_backward einsum linalg_vecdot scaled_dot_product_attention _scaled_mm _grouped_mm _scaled_grouped_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
""".split()


def count_all_kernels_for_tensor_cores(stock: Callable[..., None], self: Any) -> None:
    """GPU Summary: the share of Tensor-Core time excludes kernels without an operator, as in a CUDA graph."""
    stock(self)
    for gpu in self.gpu_metrics_parser.gpu_ids:
        kernels = [event for event in self.events if event.type == "Kernel" and event.device_id == gpu]
        time = sum(kernel.duration for kernel in kernels)
        on_tensor_cores = sum(each.duration for each in kernels if kernel_properties.uses_tensor_cores(each.name))
        self.tc_ratio[gpu] = on_tensor_cores / time if time else 0.0


def count_communication_kernels(stock: Callable[..., None], self: Any, event: Any, comm_nodes: dict[int, Any]) -> None:
    """Overview, CUDA: NCCL's kernels count as computation, as they no longer name the operation that launched them."""
    from torch_tb_profiler.profiler.event_parser import ProfileRole

    stock(self, event, comm_nodes)
    if event.type == "Kernel" and event.name.startswith("nccl") and event.external_id not in comm_nodes:
        self.role_ranges[ProfileRole.Communication].append(self.role_ranges[ProfileRole.Kernel].pop())


def name_no_operator_where_none_is_known(stock: Callable[..., list[Any]], kernels: list[Any]) -> list[Any]:
    """Kernel: CallTreeRoot appears as the operator of kernels that no operator launched."""
    for kernel in kernels:
        kernel.op_name = None if kernel.op_name == "CallTreeRoot" else kernel.op_name  # shown as N/A
    return stock(kernels)


def compare_only_memory_of_gpus_with_theirs(stock: Callable[..., dict[Any, int]], self: Any) -> dict[Any, int]:
    """Overview, CUDA with memory: the CPU's peak is compared with the last GPU's memory, and reported at its limit."""
    from torch_tb_profiler.profiler.trace import DeviceType

    return {device: peak for device, peak in stock(self).items() if device[0] == DeviceType.CUDA}


def say_that_no_steps_are_marked(stock: Callable[..., None], self: Any) -> None:
    """Overview: the whole recording of a trace without steps is shown as one step, number 0."""
    stock(self)
    if all(event.type != "ProfilerStep" for event in self.events):
        self.recommendations.insert(0, NO_STEPS)


NO_STEPS = (
    "This trace marks no training steps. Step 0 shows the whole recording. "
    "Call profiler.step() after every step and record it again."
)


def correct_the_parsing_processes(
    stock: Callable[..., object], target: Callable[..., object], args: tuple[object, ...]
) -> object:
    """All views: the plugin parses each trace in a separate process, and a spawned process has the stock plugin."""
    return stock(target=_parse_corrected, args=(target, *args))


def _parse_corrected(target: Callable[..., object], *args: object) -> None:
    apply()
    gc.disable()  # garbage collection takes a fifth of the time, and the process ends right after
    target(*args)


CORRECTIONS: dict[str, Callable[..., object]] = {  # by the plugin's function that each replaces
    "plugin:TorchProfilerPlugin._get_run_dirs": leave_out_what_is_being_recorded,
    "plugin:TorchProfilerPlugin._load_run": end_loading_for_certain,
    "plugin:TorchProfilerPlugin.get_plugin_apps": pages.draw_without_internet,
    "profiler.data:RunProfileData.__init__": correct_the_data,
    "profiler.data:RunProfileData.process": count_all_kernels_for_tensor_cores,
    "profiler.data:RunProfileData.analyze": say_that_no_steps_are_marked,
    "profiler.data:DistributedRunProfileData.__init__": distributed.keep_the_path_of_the_trace,
    "profiler.diffrun.contract:DiffStats.__init__": pages.compare_operators_by_name,
    "profiler.event_parser:StepParser._parse_step": count_communication_kernels,
    "profiler.gpu_metrics_parser:GPUMetricsParser.get_gpu_metrics_data_tooltip": pages.show_names_of_gpus_as_text,
    "profiler.loader:Process": correct_the_parsing_processes,
    "profiler.loader:RunLoader._process_distributed_profiles": distributed.compare_ranks,
    "profiler.memory_parser:MemorySnapshot.get_peak_memory": compare_only_memory_of_gpus_with_theirs,
    "profiler.op_agg:aggregate_kernels": name_no_operator_where_none_is_known,
    "profiler.tensor_core:TC_Allowlist.__contains__": know_tensor_core_kernels,
    "profiler.tensor_core:TC_OP_Allowlist.__contains__": know_todays_operators,
    "run:RunProfile.get_module_view": pages.round_times_of_modules,
}


# Corrections of the traces' data.

COUNTED = re.compile(r"enumerate\(DataLoader\)#.*\.__next__$|enumerate\(DataPipe\)#|Optimizer\.", re.DOTALL)


def correct(trace: files.Json) -> files.Json:
    """Return a corrected copy of a trace that was parsed from its JSON."""
    for correction in OF_TRACES:
        trace = trace | {"traceEvents": list(correction(trace))}
    return trace


def ignore_steps_without_a_number(trace: files.Json) -> Iterator[Event]:
    """All views: a user's `record_function` with a name like a step's makes the plugin refuse the trace."""
    for event in trace["traceEvents"]:
        name = event.get("name", "")
        if not (name.startswith("ProfilerStep#") and not re.fullmatch(r"ProfilerStep#\d+", name)):
            yield event


def rename_categories(trace: files.Json) -> Iterator[Event]:
    """Overview, Operator, Kernel: the plugin does not know today's categories.

    - The DataLoader's time is 0, and counts elsewhere: the plugin expects waiting for a batch and the optimizer's step
      among the operators, and drops annotations. The user's `record_function` annotations stay out.
    - CUDA: every step appears twice, since it has a copy on the GPU's time line. Here the copies get a category that
      the plugin does not know, so that they remain only in the Trace view.
    - CUDA: Runtime is 0, device times are 0, kernels have no operators. The plugin expects runtime calls in the
      category `runtime`; today they are `cuda_runtime`, and `cuda_driver` for launches by Triton or nvjet.
    """
    renamed = {"gpu_user_annotation": "annotation_on_gpu", "cuda_runtime": "runtime", "cuda_driver": "runtime"}
    for event in trace["traceEvents"]:
        category = event.get("cat")
        counted = category == "user_annotation" and COUNTED.match(event.get("name", ""))
        new = "cpu_op" if counted else renamed.get(category)
        yield event | {"cat": new} if new else event


def link_calls_to_their_operators(trace: files.Json) -> Iterator[Event]:
    """Operator, Kernel, Module, CUDA: operators are charged with other operators' calls; times may be negative.

    In some traces a runtime call's `External id` is only its own number, which an operator may have by chance. A call
    belongs to an operator only if the operator was running. Calls without an operator have no `External id`, like
    modules, and the plugin charges the first module with them. Id 0 links to nothing.
    """
    events = trace["traceEvents"]
    operators = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation") and "dur" in event]
    known = {files.external_id(event) for event in operators} - {0, None}
    calls = [event for event in events if event.get("cat") == "runtime" and files.external_id(event) in known]
    starts = np.array([event["ts"] for event in operators], float)
    ends = starts + np.array([event["dur"] for event in operators], float)
    moments = np.array([event["ts"] for event in calls], float)
    made_by = columns.callers(_external_ids(calls), moments, _external_ids(operators), starts, ends)
    by_chance = {id(call) for call, operator in zip(calls, made_by, strict=True) if operator < 0}
    for event in events:
        unlinked = event.get("cat") == "runtime" and files.external_id(event) is None
        if unlinked or id(event) in by_chance:
            event = event | {"args": (event.get("args") or {}) | {"External id": 0}}
        yield event


def _external_ids(events: list[Event]) -> np.ndarray:
    return columns.numbers([files.external_id(event) for event in events])


def ignore_memory_shared_with_workers(trace: files.Json) -> Iterator[Event]:
    """Memory, CPU: with workers the curve drops to 0 again and again.

    Mapping and unmapping shared batches is recorded like allocations and releases: see `shared_with_workers`.
    """
    from stepscope.traces.memory import shared_with_workers  # here: it loads pandas

    events = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    events = [event for event in events if (event.get("args") or {}).get("Device Type") == 0]
    events.sort(key=lambda event: event["ts"])
    names = ("Addr", "Bytes", "Total Allocated", "Total Reserved")
    shared = shared_with_workers([event["args"].get(name, 0) for name in names] for event in events)
    ignored = {id(event) for event in itertools.compress(events, shared)}
    return (event for event in trace["traceEvents"] if id(event) not in ignored)


def estimate_missing_occupancy(trace: files.Json) -> Iterator[Event]:
    """GPU Summary, Kernel: the occupancy is 0 for every kernel with more than 48 KiB of shared memory.

    PyTorch's profiler writes this 0; `kernel_properties.estimated_occupancy` replaces it.
    """
    name = "est. achieved occupancy %"
    devices = {device.get("id"): device for device in trace.get("deviceProperties") or []}
    for event in trace["traceEvents"]:
        launch = event.get("args") or {}
        if launch.get(name) == 0:
            grid, block, registers, shared = map(launch.get, ("grid", "block", "registers per thread", "shared memory"))
            device = devices.get(launch.get("device"))
            estimated = kernel_properties.estimated_occupancy(grid, block, registers, shared, device)
            if estimated >= 0.5:  # otherwise it is below 0.5%, or unknown
                event = event | {"args": launch | {name: estimated}}
        yield event


def add_call_stacks(trace: files.Json) -> Iterator[Event]:
    """Operator: the call stacks stay empty, although they were recorded.

    With `with_stack` the Python frames are separate events; the plugin expects them as text in each operator.
    """
    events = trace["traceEvents"]
    frames = {event["args"]["Python id"]: event for event in events if _is_frame(event)}
    around = _innermost_frames(events) if frames else {}
    for event in events:
        frame = around.get(id(event))
        if frame is None or "Call stack" in event["args"]:
            yield event
        else:
            stack = sys.intern(_call_stack(frame, frames))  # each step has the same stacks: keep one copy
            yield event | {"args": event["args"] | {"Call stack": stack}}


def _call_stack(number: int, frames: dict[int, Event]) -> str:
    """Return the names of a frame and of its callers, innermost first, in torch's format."""
    names = []
    while (frame := frames.get(number)) is not None:
        names.append(f"{frame['name']};")
        number = frame["args"].get("Python parent id")
    return "".join(names)


def _is_frame(event: Event) -> bool:
    return event.get("cat") == "python_function" and "Python id" in (event.get("args") or {})


def _innermost_frames(events: list[Event]) -> dict[int, int]:
    """Return for each operator, by its `id`, the number of the innermost Python frame around it in its thread."""
    nested = [event for event in events if _is_frame(event) or (event.get("cat") == "cpu_op" and "args" in event)]
    nested.sort(key=lambda event: (str(event["tid"]), event["ts"], -event["dur"]))
    around, thread = {}, None
    open_frames: list[tuple[float, int]] = []
    for event in nested:
        if event["tid"] != thread:
            thread, open_frames = event["tid"], []
        while open_frames and open_frames[-1][0] < event["ts"] + event["dur"]:
            open_frames.pop()
        if _is_frame(event):
            open_frames.append((event["ts"] + event["dur"], event["args"]["Python id"]))
        elif open_frames:
            around[id(event)] = open_frames[-1][1]
    return around


OF_TRACES = (
    ignore_steps_without_a_number,
    rename_categories,
    link_calls_to_their_operators,
    ignore_memory_shared_with_workers,
    estimate_missing_occupancy,
    add_call_stacks,
)


def write_copies(logdir: str | Path, out: str | Path) -> tuple[list[Path], list[TraceError]]:
    """Write a corrected gzip copy of every trace in `logdir` into `out`, in folders of the same names.

    Returns
    -------
    written : list of Path
        The corrected copies.
    refused : list of TraceError
        The errors of traces that could not be copied; each names its file.

    Raises
    ------
    NoTraces
        If there are no traces in `logdir`.
    TargetExists
        If `out` lies in `logdir`, where TensorBoard would show traces twice, or if a file with a copy's name exists.
    """
    logdir, out = Path(logdir).resolve(), Path(out).resolve()
    originals = [file for run in files.runs(logdir) for file in files.of_run(run)]
    if out.is_relative_to(logdir):
        raise TargetExists(f"The copies would lie in {out}, among the traces in {logdir}. Name a folder outside of it.")
    names = {file: f"{file.name.removesuffix('.gz')}.gz" for file in originals}
    targets = {file: out / file.relative_to(logdir).with_name(name) for file, name in names.items()}
    for target in filter(Path.exists, targets.values()):
        raise TargetExists(f"The file {target} exists already. Name another folder, or remove this file.")
    written, refused = [], []
    for file, target in targets.items():
        try:
            corrected = files.read(file, lambda parts: orjson.dumps(correct(files.joined(parts))))
        except TraceError as error:
            refused.append(error)
        else:
            staging.write(target, gzip.compress(corrected, 6))
            written.append(target)
    return written, refused
