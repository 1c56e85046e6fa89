"""Corrects TensorBoard's profiler tab in memory, so that it is right on today's traces and draws without internet.

The plugin, torch-tb-profiler, has left its repository; 0.4.3 is its last release, and what is corrected here. Each
correction is a function of a few lines, with the fault it fixes in its docstring. Files stay as they are: those of
the plugin, and the traces.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from helpers import staging
from helpers.tensorboard import data, distributed, pages, perfetto
from helpers.traces import tensor_cores

CORRECTED_VERSION = "0.4.3"


def uncorrectable() -> str | None:
    """Return why the installed plugin cannot be corrected, or None if it can."""
    found = metadata.version("torch-tb-profiler")
    if found == CORRECTED_VERSION:
        return None
    return (
        f"torch-tb-profiler {found} is installed, but the corrections of this course are for {CORRECTED_VERSION}: none "
        "is applied, so loading may be shown as 0. Install torch-tb-profiler=="
        f"{CORRECTED_VERSION} for the corrected profiler tab."
    )


@functools.cache
def apply() -> None:
    """Apply all corrections to the plugin in this process, once; none if it is of another version."""
    if uncorrectable() is None:
        for correction in CORRECTIONS:
            correction()


def correct_the_data() -> None:
    """All views: the plugin misreads today's traces in the ways that `data` names."""
    from torch_tb_profiler.profiler.data import RunProfileData

    stock = RunProfileData.__init__

    def __init__(self, worker: str, span: str, trace_json: dict) -> None:
        stock(self, worker, span, data.correct(trace_json))

    RunProfileData.__init__ = __init__


def leave_out_what_is_being_recorded() -> None:
    """Runs: a recording that is not whole yet appears as a run of its own, which then stays."""
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    stock = TorchProfilerPlugin._get_run_dirs

    def _get_run_dirs(self) -> Iterator[str]:
        return (folder for folder in stock(self) if not staging.is_staging(Path(folder)))

    TorchProfilerPlugin._get_run_dirs = _get_run_dirs


def end_loading_for_certain() -> None:
    """Runs: now and then the page loads for ever.

    A thread that loads a run is listed after it was started, and takes itself from the list when it is done: if it is
    done before it is listed, it stays in the list.
    """
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    stock = TorchProfilerPlugin._load_run

    def _load_run(self, run_dir: str) -> None:
        while threading.current_thread() not in self._load_threads:
            time.sleep(0.001)
        stock(self, run_dir)

    TorchProfilerPlugin._load_run = _load_run


def know_tensor_core_kernels() -> None:
    """GPU Summary, Operator, Kernel: the Tensor-Core kernels of Hopper, and many of Ampere, count as others."""
    from torch_tb_profiler.profiler.tensor_core import TC_Allowlist

    TC_Allowlist.__contains__ = classmethod(lambda cls, kernel: tensor_cores.uses_tensor_cores(kernel))


def know_todays_operators() -> None:
    """Operator, recommendations, CUDA: the backward pass of convolutions, and attention, count as not for Tensor Cores.

    The names are those of autocast's list in `ATen/autocast_mode.h` of torch 2.15, and what they call.
    """
    from torch_tb_profiler.profiler.tensor_core import TC_OP_Allowlist

    TC_OP_Allowlist.allowlist += [f"aten::{name}" for name in TENSOR_CORE_OPERATORS]


TENSOR_CORE_OPERATORS = """
    convolution_backward einsum linalg_vecdot scaled_dot_product_attention _scaled_mm _grouped_mm _scaled_grouped_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
""".split()


def count_all_kernels_for_tensor_cores() -> None:
    """GPU Summary: the share of Tensor-Core time leaves out kernels of no operator, such as those of a CUDA graph."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.trace import EventTypes

    stock = RunProfileData.process

    def process(self) -> None:
        stock(self)
        for gpu in self.gpu_metrics_parser.gpu_ids:
            kernels = [event for event in self.events if event.type == EventTypes.KERNEL and event.device_id == gpu]
            time = sum(kernel.duration for kernel in kernels)
            on_tensor_cores = sum(each.duration for each in kernels if tensor_cores.uses_tensor_cores(each.name))
            self.tc_ratio[gpu] = on_tensor_cores / time if time else 0.0

    RunProfileData.process = process


def count_communication_kernels() -> None:
    """Overview, CUDA: NCCL's kernels count as computation.

    They no longer carry the number of the operation that launched them, so the plugin does not know them for what
    they are. Their names show it.
    """
    from torch_tb_profiler.profiler.event_parser import ProfileRole, StepParser
    from torch_tb_profiler.profiler.trace import EventTypes

    stock = StepParser._parse_step

    def _parse_step(self, event, comm_nodes: dict) -> None:
        stock(self, event, comm_nodes)
        if event.type == EventTypes.KERNEL and event.name.startswith("nccl"):
            kernels, communication = (
                self.role_ranges[role] for role in (ProfileRole.Kernel, ProfileRole.Communication)
            )
            if event.external_id not in comm_nodes:
                communication.append(kernels.pop())

    StepParser._parse_step = _parse_step


def name_no_operator_where_none_is_known() -> None:
    """Kernel: kernels whose launch belongs to no operator are said to be launched by CallTreeRoot."""
    from torch_tb_profiler.profiler import op_agg

    stock = op_agg.aggregate_kernels

    def aggregate_kernels(kernels: list) -> list:
        for kernel in kernels:
            kernel.op_name = None if kernel.op_name == "CallTreeRoot" else kernel.op_name  # shown as N/A
        return stock(kernels)

    op_agg.aggregate_kernels = aggregate_kernels


def compare_only_memory_of_gpus_with_theirs() -> None:
    """Overview, CUDA with memory: the CPU's peak is compared with the last GPU's memory, and found at its limit."""
    from torch_tb_profiler.profiler.memory_parser import MemorySnapshot
    from torch_tb_profiler.profiler.trace import DeviceType

    stock = MemorySnapshot.get_peak_memory

    def get_peak_memory(self) -> dict:
        return {device: peak for device, peak in stock(self).items() if device[0] == DeviceType.CUDA}

    MemorySnapshot.get_peak_memory = get_peak_memory


def say_that_no_steps_are_marked() -> None:
    """Overview: of a trace without steps, the whole recording is shown as one step, number 0."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.trace import EventTypes

    stock = RunProfileData.analyze

    def analyze(self) -> None:
        stock(self)
        if all(event.type != EventTypes.PROFILER_STEP for event in self.events):
            self.recommendations.insert(0, NO_STEPS)

    RunProfileData.analyze = analyze


NO_STEPS = (
    "This trace marks no training steps. What is shown as step 0 is the whole recording. "
    "Call profiler.step() after every step and record it again."
)


def correct_the_parsing_processes() -> None:
    """All views: the plugin parses each trace in a process of its own, and a spawned one has the stock plugin."""
    from torch_tb_profiler.profiler import loader

    stock = loader.Process

    def process(target: Callable, args: tuple):
        return stock(target=_parse_corrected, args=(target, *args))

    loader.Process = process


def _parse_corrected(target: Callable, *args) -> None:
    apply()
    gc.disable()  # parses in 8.4 s what takes 10.5 s with it; the process ends right after
    target(*args)


CORRECTIONS = (
    correct_the_data,
    leave_out_what_is_being_recorded,
    end_loading_for_certain,
    know_tensor_core_kernels,
    know_todays_operators,
    count_all_kernels_for_tensor_cores,
    count_communication_kernels,
    name_no_operator_where_none_is_known,
    compare_only_memory_of_gpus_with_theirs,
    say_that_no_steps_are_marked,
    distributed.know_what_ranks_exchange,
    distributed.compare_what_ranks_share,
    correct_the_parsing_processes,
    distributed.keep_ranks_of_one_name_apart,
    pages.draw_without_internet,
    pages.compare_operators_by_name,
    pages.show_names_of_gpus_as_text,
    pages.round_times_of_modules,
    perfetto.show_traces_without_internet,
)
