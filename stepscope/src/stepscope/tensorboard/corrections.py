"""Corrects TensorBoard's profiler tab in memory, so that it is right on today's traces and draws without internet.

The plugin, torch-tb-profiler, has left its repository; 0.4.3 is its last release, and what is corrected here. Files
stay as they are: those of the plugin, and the traces. Each correction is a function of a few lines, with the fault it
fixes in its docstring. It is called in the place of one of the plugin's functions, with that as its first argument.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from stepscope.base import staging
from stepscope.tensorboard import distributed, fix, pages
from stepscope.traces import kernel_names

CORRECTED_VERSION = "0.4.3"
PACKAGES = ("tensorboard", "torch_tb_profiler", "viztracer")  # of stepscope's extra `tab`


def check_packages() -> None:
    """Raise ModuleNotFoundError unless this Python has what the profiler tab needs."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            install = f'{sys.executable} -m pip install "stepscope[tab]"'
            raise ModuleNotFoundError(f"{sys.executable} lacks {name}. Install it:  {install}", name=name)


def uncorrectable() -> str | None:
    """Return why the installed plugin cannot be corrected, or None if it can."""
    found = metadata.version("torch-tb-profiler")
    if found == CORRECTED_VERSION:
        return None
    return (
        f"torch-tb-profiler {found} is installed, but the corrections are for {CORRECTED_VERSION}: none is applied, so "
        f"loading may be shown as 0. Install torch-tb-profiler=={CORRECTED_VERSION} for the corrected profiler tab."
    )


@functools.cache
def apply() -> None:
    """Apply all corrections to the plugin in this process, once; none if it is of another version."""
    if uncorrectable() is None:
        for place, correction in CORRECTIONS.items():
            replace(place, correction)


def replace(place: str, correction: Callable) -> None:
    """Put a correction in the place of a function of the plugin, ``module:name`` or ``module:Class.name``."""
    module, _, names = place.partition(":")
    *owners, name = names.split(".")
    owner = importlib.import_module(f"torch_tb_profiler.{module}")
    for part in owners:
        owner = getattr(owner, part)
    stock = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: correction(stock, *arguments, **options))


def correct_the_data(stock: Callable, self, worker: str, span: str, trace: dict) -> None:
    """All views: the plugin misreads today's traces in the ways that `fix` names."""
    stock(self, worker, span, fix.correct(trace))


def leave_out_what_is_being_recorded(stock: Callable, self) -> list[str]:
    """Runs: a recording that is not whole yet appears as a run of its own, which then stays."""
    return [folder for folder in stock(self) if not staging.is_staging(Path(folder))]


def end_loading_for_certain(stock: Callable, self, run_dir: str) -> None:
    """Runs: the page loads for ever if a thread that loads a run is done before the plugin has listed it."""
    while threading.current_thread() not in self._load_threads:
        time.sleep(0.001)
    stock(self, run_dir)


def know_tensor_core_kernels(stock: Callable, kernel: str) -> bool:
    """GPU Summary, Operator, Kernel: the Tensor-Core kernels of Hopper, and many of Ampere, count as others."""
    return kernel_names.uses_tensor_cores(kernel)


def know_todays_operators(stock: Callable, operator: str) -> bool:
    """Operator, recommendations, CUDA: convolutions' backward pass, and attention, count as not for Tensor Cores."""
    return operator.removeprefix("aten::") in TENSOR_CORE_OPERATORS or stock(operator)


# Of autocast's list in `ATen/autocast_mode.h` of torch 2.15, and what they call
TENSOR_CORE_OPERATORS = """
    convolution_backward einsum linalg_vecdot scaled_dot_product_attention _scaled_mm _grouped_mm _scaled_grouped_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
""".split()


def count_all_kernels_for_tensor_cores(stock: Callable, self) -> None:
    """GPU Summary: the share of Tensor-Core time leaves out kernels of no operator, such as those of a CUDA graph."""
    stock(self)
    for gpu in self.gpu_metrics_parser.gpu_ids:
        kernels = [event for event in self.events if event.type == "Kernel" and event.device_id == gpu]
        time = sum(kernel.duration for kernel in kernels)
        on_tensor_cores = sum(each.duration for each in kernels if kernel_names.uses_tensor_cores(each.name))
        self.tc_ratio[gpu] = on_tensor_cores / time if time else 0.0


def count_communication_kernels(stock: Callable, self, event, comm_nodes: dict) -> None:
    """Overview, CUDA: NCCL's kernels count as computation, for they no longer name the operation that launched them."""
    from torch_tb_profiler.profiler.event_parser import ProfileRole

    stock(self, event, comm_nodes)
    if event.type == "Kernel" and event.name.startswith("nccl") and event.external_id not in comm_nodes:
        self.role_ranges[ProfileRole.Communication].append(self.role_ranges[ProfileRole.Kernel].pop())


def name_no_operator_where_none_is_known(stock: Callable, kernels: list) -> list:
    """Kernel: kernels whose launch belongs to no operator are said to be launched by CallTreeRoot."""
    for kernel in kernels:
        kernel.op_name = None if kernel.op_name == "CallTreeRoot" else kernel.op_name  # shown as N/A
    return stock(kernels)


def compare_only_memory_of_gpus_with_theirs(stock: Callable, self) -> dict:
    """Overview, CUDA with memory: the CPU's peak is compared with the last GPU's memory, and found at its limit."""
    from torch_tb_profiler.profiler.trace import DeviceType

    return {device: peak for device, peak in stock(self).items() if device[0] == DeviceType.CUDA}


def say_that_no_steps_are_marked(stock: Callable, self) -> None:
    """Overview: of a trace without steps, the whole recording is shown as one step, number 0."""
    stock(self)
    if all(event.type != "ProfilerStep" for event in self.events):
        self.recommendations.insert(0, NO_STEPS)


NO_STEPS = (
    "This trace marks no training steps. What is shown as step 0 is the whole recording. "
    "Call profiler.step() after every step and record it again."
)


def correct_the_parsing_processes(stock: Callable, target: Callable, args: tuple):
    """All views: the plugin parses each trace in a process of its own, and a spawned one has the stock plugin."""
    return stock(target=_parse_corrected, args=(target, *args))


def _parse_corrected(target: Callable, *args) -> None:
    apply()
    gc.disable()  # takes a fifth of the time; the process ends right after
    target(*args)


CORRECTIONS = {  # by the plugin's function that each stands in for
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
