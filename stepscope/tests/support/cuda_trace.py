"""A CUDA trace written by hand, and what must be found in it: the specification of `stepscope.traces` on GPUs.

Three equal training steps of 1000 µs on a made-up GPU. All times are in µs. This is one of them; *s* is its start on
the host, and what is on the GPU bears the number of the host's call that launched it:

====================  ================================================================================================
host, main thread     loading 0–200 │ to 200–240 (copies at 220 ①) │ conv2d 250–350 (launches at 290 ②) │
                      relu 360–400 (370 ③) │ a Triton kernel 410–430 (415 ④) │ optimizer 560–700 (600 ⑦) │
                      zero_grad 710–740 (720 ⑧) │ item 750–860 (760 ⑨, waits 780–850) │ a C++ extension (950 ⑩)
host, autograd        backward 440–550: mm (460 ⑤), all_reduce (512 ⑥)
host, pinning thread  asks for an event 100–110
GPU, stream 7         ① 230–330 │ ② 340–540 │ ③ 550–570 │ ④ 570–610 │ ⑤ 610–710 │ ⑦ 770–830 │ ⑧ 830–840 │ ⑨ 840–845 │
                      ⑩ 980–1040
GPU, stream 20        ⑥ 660–760, while ⑤ runs
====================  ================================================================================================

The last kernel ends 40 µs after the host has begun the next step, so a step lasts from s + 40 to s + 1040. (The first
one begins 40 µs late on the host.)

At the end, simulated training loops with one fault each: the specification of `stepscope.diagnosis`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from support import written

BEGIN = 1_000_000  # of the trace, on the profiler's clock
LENGTH = 1000
NUMBERS = (4, 5, 6)  # of the steps

DEVICE = {
    "id": 0, "name": "Made-up GPU", "totalGlobalMem": 16 << 30, "computeMajor": 8, "computeMinor": 0, "numSms": 100,
    "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "warpSize": 32, "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536, "sharedMemPerBlock": 48 << 10, "sharedMemPerMultiprocessor": 164 << 10,
    "sharedMemPerBlockOptin": 163 << 10,
}  # fmt: skip

CONVOLUTION = (
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1"
    "_g1_tensor16x8x8_execute_kernel__5x_cudnn"
)
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::relu, std::array<char*, 2ul> >(int, …)"
TRITON = "triton_poi_fused_add_0"
PRODUCT = "ampere_sgemm_128x64_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
UPDATE = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<2> >(int)"
EXTENSION = "my_extension::scale(float*, float, int)"
ALONE, WORKERS = "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"
LOADING = f"enumerate(DataLoader)#{WORKERS}.__next__"

# Each moment of a step, 40 to 1040, is charged to the first of these that claims it.
BREAKDOWN = {
    "Kernel": 480,  # 340–540, 550–710, 770–830, 980–1040
    "Memcpy": 105,  # 230–330, 840–845
    "Memset": 10,  # 830–840
    "Communication": 50,  # 710–760: what of ⑥ no other kernel hides
    "Runtime": 35,  # 100–110, 220–230, 760–765, 845–850, 950–955
    "DataLoader": 150,  # 40–200, without 100–110
    "CPU Exec": 55,  # 200–220, 330–340, 540–550, 765–770, 850–860
    "Other": 115,  # 860–950, 955–980
}

TOTAL = 3000  # the steps, from the first one's start to the last one's end
UTILIZATION = 3 * (200 + 210 + 60 + 60) / TOTAL  # 340–540, 550–760, 770–830, 980–1040: all kernels, no copies
SM_EFFICIENCY = (
    3
    * (
        200 * 1.0  # ② has 2 blocks for each multiprocessor, which count as 1
        + 20 * 0.5  # ③
        + 40 * 1.0  # ④ 2 blocks
        + 50 * 0.8  # ⑤ alone, 610–660
        + 50 * 1.0  # ⑤ and ⑥ together, 660–710: 0.8 + 0.4 are more than 1
        + 50 * 0.4  # ⑥ alone, 710–760
        + 60 * 0.5  # ⑦
        + 60 * 0.5  # ⑩
    )
    / TOTAL
)
KERNEL_TIME = 3 * (200 + 20 + 40 + 100 + 100 + 60 + 60)
TENSOR_CORE_SHARE = 3 * 200 / KERNEL_TIME  # ②

# ② has 80 KiB of shared memory a block, so the profiler has written 0. Two blocks of 256 threads fit a multiprocessor:
# its 65536 registers hold two (128 each), its 164 KiB of shared memory hold two (80 KiB and the system's 1 KiB each).
CONVOLUTION_OCCUPANCY = 2 * 256 / 2048
OCCUPANCY = (
    3
    * (
        200 * CONVOLUTION_OCCUPANCY
        + 20 * 0.25  # ③ 0.5 blocks of 1024 threads, of 2048
        + 40 * 1.0  # ④ 2 blocks of 1024
        + 100 * 0.1  # ⑤ 0.8 of 256
        + 100 * 0.1  # ⑥ 0.4 of 512
        + 60 * 0.25  # ⑦ 0.5 of 1024
        + 60 * 0.25  # ⑩ 0.5 of 1024
    )
    / KERNEL_TIME
)

# For each kernel its operator, or None where it is unknown, and the µs of its three calls.
KERNELS = {
    CONVOLUTION: ("aten::cudnn_convolution", 600),
    PRODUCT: ("aten::mm", 300),
    ALL_REDUCE: ("record_param_comms", 300),
    UPDATE: ("aten::_foreach_add_", 180),
    EXTENSION: (None, 180),
    TRITON: (TRITON, 120),
    RELU: ("aten::relu", 60),
}

# For some operators the µs on the GPU: their own, and with the operators inside them. Copies and sets count here.
OPERATORS = {
    "aten::conv2d": (0, 600),
    "aten::cudnn_convolution": (600, 600),
    "aten::mm": (300, 300),
    "aten::copy_": (300, 300),  # ①
    "aten::zero_": (30, 30),  # ⑧
    "autograd::engine::evaluate_function: MmBackward0": (0, 600),  # ⑤ and ⑥
}

# Between kernels: 540–550, 760–770, 830–980 in each of three steps, and twice 1040 to 1340, into the next one.
GAPS = {"count": 11, "total": 3 * (10 + 10 + 150) + 2 * 300, "median": 10, "longest": 300}
IN_GAPS = {  # what happened meanwhile; each moment is charged to the first that claims it
    "copying": 3 * 15 + 2 * 100,  # 830–845; 230–330
    "waiting": 3 * 5,  # 845–850
    "launching": 3 * 10 + 2 * 20,  # 760–765, 950–955; 100–110, 220–230
    "loading": 2 * 150,  # 40–200, without 100–110
    "operators": 3 * 25 + 2 * 30,  # 540–550, 765–770, 850–860; 200–220, 330–340
    "other": 3 * 115,  # 860–950, 955–980
}


def events() -> list[dict]:
    """Return the events of the trace, as they stand in its JSON."""
    return [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
        _event("Trace", "PyTorch Profiler (0)", 40, 3040, pid="Spans", tid="PyTorch Profiler"),
        *(event for number in NUMBERS for event in _step(number)),
    ]


def trace() -> dict:
    """Return the trace, as it stands in its JSON."""
    return {
        "schemaVersion": 1,
        "deviceProperties": [DEVICE],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": events(),
    }


def write(path: Path) -> Path:
    """Write the trace to a file, as gzip if its name ends so, and return the file."""
    content = trace()
    return written.write(path, content.pop("traceEvents"), **content)


PROCESS, MAIN, AUTOGRAD, PINNING = 100, 100, 101, 102


def _step(number: int) -> list[dict]:
    index = NUMBERS.index(number)
    s = index * LENGTH
    first = 100 * index + 1  # all numbers differ between steps

    def host(name, start, end, external=None, *, thread=MAIN, category="cpu_op"):
        numbers = {} if external is None else {"External id": first + external}
        return _event(category, name, s + start, s + end, tid=thread, **numbers)

    def annotation(name, start, end, external):
        return host(name, start, end, external, category="user_annotation")

    def call(name, start, end, launch, external, *, thread=MAIN, category="cuda_runtime"):
        """A call of the runtime; `external` is the operator's, 0 for none, None for unlinked."""
        numbers = {} if external is None else {"External id": external and first + external}
        return _event(category, name, s + start, s + end, tid=thread, correlation=first + launch, **numbers)

    def device(category, name, start, end, launch, external, stream=7, **arguments):
        numbers = {"External id": external and first + external, "correlation": first + launch}
        place = {"device": 0, "context": 1, "stream": stream}
        return _event(category, name, s + start, s + end, pid=0, tid=stream, **numbers, **place, **arguments)

    def kernel(name, start, end, launch, external, blocks, threads, occupancy, registers=16, shared=0, stream=7):
        return device(
            "kernel", name, start, end, launch, external, stream,
            **{
                "grid": [blocks, 1, 1], "block": [threads, 1, 1], "registers per thread": registers,
                "shared memory": shared, "blocks per SM": blocks / DEVICE["numSms"],
                "warps per SM": blocks / DEVICE["numSms"] * threads / 32, "est. achieved occupancy %": occupancy,
            },
        )  # fmt: skip

    def module(name, start, end, id, parent, instance):
        numbers = {"Python id": first + id, "Python parent id": first + parent if parent else None}
        numbers["Python module id"] = instance
        return _event("python_function", f"nn.Module: {name}", s + start, s + end, tid=MAIN, **numbers)

    return [
        annotation(f"ProfilerStep#{number}", 40 if index == 0 else 0, 1000, 1),
        annotation(LOADING, 40 if index == 0 else 0, 200, 2),
        call("cudaEventQuery", 100, 110, 11, None, thread=PINNING),
        _memory(s + 150, bytes=4096, allocated=0, reserved=4096),  # maps what a worker has shared: no allocation
        # The batch goes to the GPU.
        host("aten::to", 200, 240, 3),
        host("aten::copy_", 210, 240, 4),
        _memory(s + 212, bytes=4096, allocated=8192, reserved=2 << 20, on_gpu=True),
        call("cudaMemcpyAsync", 220, 230, 1, 4),
        device("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 230, 330, 1, 4, bytes=4096),
        # The forward pass.
        module("Net_0", 245, 435, 1, None, 0),
        module("Conv2d_0", 247, 352, 2, 1, 0),
        host("aten::conv2d", 250, 350, 5),
        host("aten::_convolution", 260, 345, 6),
        host("aten::cudnn_convolution", 270, 330, 7),
        _memory(s + 280, bytes=65536, allocated=73728, reserved=2 << 20, on_gpu=True),
        call("cudaLaunchKernel", 290, 300, 2, 7),
        kernel(CONVOLUTION, 340, 540, 2, 7, blocks=200, threads=256, occupancy=0, registers=128, shared=80 << 10),
        module("ReLU_0", 355, 405, 3, 1, 0),
        host("aten::relu", 360, 400, 8),
        call("cudaLaunchKernel", 370, 380, 3, 8),
        kernel(RELU, 550, 570, 3, 8, blocks=50, threads=1024, occupancy=25),
        host(TRITON, 410, 430, 9),
        call("cuLaunchKernel", 415, 420, 4, 9, category="cuda_driver"),
        kernel(TRITON, 570, 610, 4, 9, blocks=200, threads=1024, occupancy=100),
        # The backward pass: its own thread, and the other ranks.
        host("autograd::engine::evaluate_function: MmBackward0", 440, 550, 10, thread=AUTOGRAD),
        host("MmBackward0", 445, 490, 11, thread=AUTOGRAD),
        host("aten::mm", 450, 485, 12, thread=AUTOGRAD),
        call("cudaLaunchKernel", 460, 470, 5, 12, thread=AUTOGRAD),
        kernel(PRODUCT, 610, 710, 5, 12, blocks=80, threads=256, occupancy=10),
        host("c10d::allreduce_", 500, 535, 13, thread=AUTOGRAD),
        host("record_param_comms", 505, 530, 14, thread=AUTOGRAD),
        host("nccl:all_reduce", 510, 525, 15, thread=AUTOGRAD, category="user_annotation"),
        call("cudaLaunchKernelExC", 512, 522, 6, 14, thread=AUTOGRAD),
        kernel(ALL_REDUCE, 660, 760, 6, 14, blocks=40, threads=512, occupancy=10, stream=20),
        # The optimizer.
        annotation("Optimizer.step#SGD.step", 560, 700, 16),
        host("aten::_foreach_add_", 580, 680, 17),
        call("cudaLaunchKernel", 600, 610, 7, 17),
        kernel(UPDATE, 770, 830, 7, 17, blocks=50, threads=1024, occupancy=25),
        annotation("Optimizer.zero_grad#SGD.zero_grad", 710, 740, 18),
        host("aten::zero_", 715, 735, 19),
        call("cudaMemsetAsync", 720, 725, 8, 19),
        device("gpu_memset", "Memset (Device)", 830, 840, 8, 19, bytes=65536),
        # loss.item()
        host("aten::item", 750, 860, 20),
        host("aten::_local_scalar_dense", 755, 855, 21),
        call("cudaMemcpyAsync", 760, 765, 9, 21),
        device("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 840, 845, 9, 21, bytes=4),
        call("cudaStreamSynchronize", 780, 850, 12, 21),
        _memory(s + 870, bytes=-65536, allocated=8192, reserved=2 << 20, on_gpu=True),
        # A kernel that no operator of PyTorch launches.
        call("cudaLaunchKernel", 950, 955, 10, 0),
        kernel(EXTENSION, 980, 1040, 10, 0, blocks=50, threads=1024, occupancy=25),
        # The profiler's copies of annotations, on the time line of the GPU.
        device("gpu_user_annotation", f"ProfilerStep#{number}", 230, 1040, 1, 1),
        device("gpu_user_annotation", "nccl:all_reduce", 660, 760, 6, 15, stream=20),
        device("gpu_user_annotation", "Optimizer.step#SGD.step", 770, 830, 7, 16),
    ]


def _event(category: str, name: str, start: float, end: float, *, pid=PROCESS, tid=MAIN, **arguments) -> dict:
    return written.event(category, name, BEGIN + start, BEGIN + end, thread=tid, **arguments) | {"pid": pid}


def _memory(time: float, *, bytes: int, allocated: int, reserved: int, on_gpu: bool = False) -> dict:
    place = {"Device Id": 0, "Device Type": 1} if on_gpu else {"Device Id": -1, "Device Type": 0}
    arguments = {"Bytes": bytes, "Addr": 0x1000, "Total Allocated": allocated, "Total Reserved": reserved, **place}
    return {
        "ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": PROCESS, "tid": MAIN,
        "ts": BEGIN + time, "args": arguments,
    }  # fmt: skip


def on_cpu(steps, *, operator: str = "aten::conv2d", category: str = "cpu_op", loader: str = ALONE) -> list[dict]:
    """Return events of steps without an accelerator: when each begins, has its batch, has computed, and ends."""
    return [
        _event(kind, name, start, end)
        for number, (begin, loaded, computed, until) in enumerate(steps)
        for kind, name, start, end in (
            ("user_annotation", f"ProfilerStep#{number}", begin, until),
            ("user_annotation", f"enumerate(DataLoader)#{loader}.__next__", begin, loaded),
            (category, operator, loaded, computed),
        )
    ]


TENSOR_CORE_PRODUCT = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
CONVERSION = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(cudnn::…)"
CATEGORIES_OF_1_12 = {
    "cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
}  # fmt: skip


def _of_1_12(event: dict) -> dict:
    arguments = {key.replace("External", "external"): value for key, value in event["args"].items()}
    return event | {"cat": CATEGORIES_OF_1_12.get(event["cat"], event["cat"]), "args": arguments}


@dataclass
class Loop:
    """A training loop on a made-up GPU, simulated: the host launches, the GPU follows, and lags by up to a step.

    As it stands nothing is wrong with it: kernels run for 97% of the time, and the host's own work hides behind them.
    All times are in µs.

    Attributes
    ----------
    loading : float
        Time until the next batch is there; `loader` is the class of the DataLoader's iterator.
    copy : float
        Time of the copy to the GPU, from `memory`, "Pinned" or "Pageable"; if `blocking`, the host waits for it.
    host_work : float
        Time of Python between the copy and the first kernel; the profiler records `frames` of it. In the step `stalled`
        it takes `stall` more.
    kernels : list of (str, float)
        Names and durations; each has `blocks`, and takes the host `launch` to launch.
    exchange, within : float
        Time of an all-reduce, and of a copy within the GPU, after the kernels.
    read : str or None
        The operator that reads a value from the GPU at the end of a step, or of the `read_in` first ones.
    """

    loading: float = 100
    loader: str = WORKERS
    copy: float = 200
    memory: str = "Pinned"
    blocking: bool = False
    host_work: float = 1500
    stall: float = 0
    stalled: int = 3
    frames: int = 0
    kernels: tuple = ((TENSOR_CORE_PRODUCT, 975),) * 10
    blocks: int = 400
    launch: float = 20
    exchange: float = 0
    within: float = 0
    read: str | None = None
    read_in: int = 100
    steps: int = 5
    settings: tuple = ()
    device: dict = field(default_factory=lambda: DEVICE)

    def trace(self) -> dict:
        """Return the trace, as it stands in its JSON."""
        self.now, self.free, self.number, self.events = 0.0, 0.0, 0, []
        for step in range(self.steps):
            start, busy = self.now, self.free
            self._step(step)
            self._add("user_annotation", f"ProfilerStep#{step}", start, self.now)
            self.now = max(self.now, busy)  # the queue of launches is full
        head = dict.fromkeys(self.settings, 1)
        return head | {"schemaVersion": 1, "deviceProperties": [self.device], "traceEvents": self.events}

    def write(self, path: Path, old: bool = False) -> Path:
        """Write the trace to a file and return it; if `old`, with the names that torch 1.12 used."""
        content = self.trace()
        if old:
            content["traceEvents"] = [_of_1_12(event) for event in content["traceEvents"]]
        path.write_text(json.dumps(content))
        return path

    def _step(self, step: int) -> None:
        begin = self.now
        self.now += self.loading
        self._add("user_annotation", f"enumerate(DataLoader)#{self.loader}.__next__", begin, self.now)
        waits = self.blocking or self.memory == "Pageable"
        self._copies("aten::to", f"Memcpy HtoD ({self.memory} -> Device)", self.copy, waits)
        for frame in range(self.frames):
            moment = self.now + self.host_work * frame / self.frames
            self._add("python_function", "train.py(7): step", moment, moment)
        self.now += self.host_work + self.stall * (step == self.stalled)
        for name, duration in self.kernels:
            self._launches("aten::mm", name, duration, self.blocks)
        if self.exchange:
            self._launches("record_param_comms", ALL_REDUCE, self.exchange, 24)
        if self.within:
            self._copies("aten::clone", "Memcpy DtoD (Device -> Device)", self.within, False)
        if self.read and step < self.read_in:
            self._copies(self.read, "Memcpy DtoH (Device -> Pageable)", 2, True)

    def _launches(self, operator: str, name: str, duration: float, blocks: int) -> None:
        start, numbers = self.now, self._numbers()
        self.now += self.launch
        self._add("cpu_op", operator, start, self.now, **numbers)
        self._add("cuda_runtime", "cudaLaunchKernel", self.now - 5, self.now - 1, **numbers)
        shape = {"grid": [blocks, 1, 1], "block": [256, 1, 1], "blocks per SM": blocks / DEVICE["numSms"]}
        self._runs("kernel", name, duration, **numbers, **shape)

    def _copies(self, operator: str, name: str, duration: float, waits: bool) -> None:
        """From or to pageable memory the call of the copy itself waits; else one after it does, if any."""
        start, numbers = self.now, self._numbers()
        self.now += 10
        end = self._runs("gpu_memcpy", name, duration, **numbers)
        copied = end if waits and "Pageable" in name else self.now + 4
        self._add("cuda_runtime", "cudaMemcpyAsync", self.now, copied, **numbers)
        self.now = max(copied, end) if waits else copied
        if waits:
            self._add("cuda_runtime", "cudaStreamSynchronize", copied, self.now + 2)
        self.now += 4
        self._add("cpu_op", operator, start, self.now, **numbers)
        self._add("cpu_op", "aten::copy_", start + 5, self.now - 1)

    def _runs(self, category: str, name: str, duration: float, **arguments) -> float:
        start = max(self.free + 1, self.now)
        self.free = start + duration
        self._add(category, name, start, self.free, pid=0, tid=7, device=0, stream=7, **arguments)
        return self.free

    def _numbers(self) -> dict:
        self.number += 1
        return {"External id": self.number, "correlation": self.number}

    def _add(self, category: str, name: str, start: float, end: float, **arguments) -> None:
        self.events.append(_event(category, name, start, end, **arguments))
