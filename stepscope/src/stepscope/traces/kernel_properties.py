"""Properties of a kernel: its kind of work from its name, its occupancy from its launch.

NVIDIA's libraries name their kernels after the instruction that multiplies. The families below were collected from
these sources, and are tested on names from real profiles:

- PyProf, `prof/tc.py`, NVIDIA's own list, which TensorBoard's profiler tab copied; XProf's `kernel_stats_utils.cc` has
  the same list. Both end with Turing and count every `xmma_gemm`, even those that multiply with `ffma`.
- "CUTLASS Profiler" in CUTLASS's documentation: names hold the operator class, `tensorop`, `wmma_tensorop` or `simt`,
  and the shape of the instruction, m16n8k16 as `16816`; `cutlass/arch/mma_sm*.h` has the shapes.
- cuBLAS and cuDNN in public profiles: `volta_…`, `turing_…`, `ampere_…`, `sm80_xmma_…`, `nvjet_…`,
  `cudnn_generated_fort_native_sdpa_…`.
- FlashAttention 2 to 4 and DeepGEMM: their kernels' names in the source. PyTorch's memory-efficient attention:
  `gemm_kernel_utils.h`, which uses Tensor Cores for float32 from compute capability 8.0 on (three times TF32).
"""

import functools
import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

# Shapes of the mma instructions, from Volta's m8n8k4 to Ampere's m16n8k256.
_SHAPES = "884|1684|1688|8816|8832|16816|16832|16864|88128|161616|168128|168256"

_TENSOR_CORES = re.compile(
    "|".join(
        (
            # cuBLAS, cuDNN, CUTLASS 2: the type, the instruction's shape, the operation: s16816gemm, i8816cudnn.
            rf"(?<![a-z0-9])[bcdhisz]({_SHAPES})(?=[a-z_])",
            # cuDNN, cuBLAS: the mma instruction by its name, as in Volta_hmma_implicit_gemm, flash_fprop_wgmma_f16.
            r"(?<![a-z])(w|wg|g|hg|ig|qg|h|i|d|b|q|u)mma(?![a-z])",
            # cuDNN, cuBLAS, TensorRT from Volta on: sm80_xmma_fprop_implicit_gemm_…, also without sm80.
            r"(?<![a-z0-9])xmma_(sparse_|warp_specialized_)?(gemm|fprop|dgrad|wgrad|implicit_gemm|conv)",
            r"(?<![a-z0-9])nvjet_",  # cuBLAS from Hopper on
            r"(?<![a-z0-9])cudnn_generated_fort_native_sdpa_",
            # CUTLASS: the operator class, in the names of its library and of its C++ types.
            r"tensorop_",
            r"(?-i:(Mma|OpClass|OpClassWmma)TensorOp|Mainloop\w*(Gmma|Umma))",
            r"(?-i:(?<![A-Za-z0-9])SM\d+(::GMMA::MMA)?_\d+x\d+x\d+_[A-Z]+\d)",
            # FlashAttention, without kernels that prepare, combine or convert.
            r"flash_(fwd(_splitkv(_mla)?)?|bwd_dq_dk_dv_loop(_seqk_parallel)?)_kernel(?!_traits)",
            r"Flash(Attn(Fwd|Bwd)|Attention(Forward|Backward))Sm\d+",
            r"fmha_cutlass[FB]_(f16|bf16)_\w+_sm(70|75|80)",
            r"fmha_cutlass[FB]_f32_\w+_sm80",
            r"(?<![a-z0-9])fmha_(fprop|dgrad|v2|fwd_loop|bwd_dq_dk_dv_loop)_",  # Apex, TensorRT, FlashAttention 1
            r"deep_gemm::\w*gemm",
            # cuDNN 7, from NVIDIA's list.
            r"dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv2d_c1_k1|(?<![a-z0-9])conv1x1|direct_group",
        )
    ),
    re.IGNORECASE,
)

# Exceptions from these families: names with an instruction of CUDA cores, and kernels that multiply nothing.
_OTHERS = re.compile(
    "|".join(
        (
            r"(?<![a-z])simt(?![a-z])|MmaSimt|OpClassSimt",
            r"(?<![a-z])[dfhi]fma2?(?![a-z])",  # fused multiply-add: …_ffma_aligna4_alignc4_…
            # All types are float32, and no instruction is in the name, or it is cut off. TF32's names have tf32f32.
            r"xmma_\w*?_f32f32_f32f32_f32(?!\w*(tensor|warpgroup|mma))",
            # Adds the partial sums of the kernel whose name it has: on an A100, 6 µs after a kernel of 92 µs.
            r"execute_split_k_kernel|splitK_?reduce|ReduceSplitK",
            r"^(void )?triton_",
        )
    ),
    re.IGNORECASE,
)


# Matrix products and convolutions of cuBLAS, cuDNN, CUTLASS and MAGMA on 32-bit numbers. In BLAS names, s stands for
# single: volta_sgemm_128x64_nn, cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1, cutlass_80_simt_sgemm_…. Newer
# names hold the types of both factors, the sum and the result: f32f32_f32f32_f32.
_FLOAT32_PRODUCT = re.compile(
    r"(?<![a-z0-9])(sgemm|scudnn)|(?<=simt_)sgemm"
    r"|convolve_sgemm<float|sgemm\w*kernel<float|gemm\w*kernel\w*<float"
    r"|(dgrad|wgrad_alg\d|fprop|convolve_common)\w*engine\w*<float|winograd\w*<float"
    r"|_f32f32_f32f32_f32(?![a-z0-9])"
    r"|gemv\w*<int, int, float|gemmSN_\w+<float",
    re.IGNORECASE,
)

# cuDNN converts an image batch from NCHW to NHWC and back by separate kernels; MIOpen transposes the batch. If the name
# of a convolution has nhwc2nchw, the conversion is a part of the convolution.
_LAYOUT_CONVERSION = re.compile(
    r"(?<![a-z0-9])(nchw|ncdhw|nhwc|ndhwc)To(folded)?(nchw|ncdhw|nhwc|ndhwc)\w*kernel"
    r"|(?<![a-z0-9])batched_transpose_\d+x\d+",
    re.IGNORECASE,
)


@functools.lru_cache(maxsize=100_000)
def uses_tensor_cores(kernel: str) -> bool:
    """Return whether a kernel's name shows that it computes on Tensor Cores.

    Triton's kernels (``triton_…``, or named like the user's function) give False: they use Tensor Cores for ``tl.dot``,
    but their names do not show it. So for code compiled with ``torch.compile``, a share of Tensor-Core time is a lower
    bound. The name may be mangled or demangled.
    """
    return _TENSOR_CORES.search(kernel) is not None and _OTHERS.search(kernel) is None


def multiplies_float32(kernel: str) -> bool:
    """Return whether a kernel's name shows that it multiplies or convolves in float32, and not on Tensor Cores."""
    return _FLOAT32_PRODUCT.search(kernel) is not None and not uses_tensor_cores(kernel)


def converts_layout(kernel: str) -> bool:
    """Return whether a kernel's name shows that it only changes the memory format of images."""
    return _LAYOUT_CONVERSION.search(kernel) is not None


# Classes of kernels: what a kernel does, by the first pattern that its name has. Products and convolutions compute; all
# other classes read and write tensors, and their time is that of the bytes they move.
COMPILED = "compiled"
NORMALIZATION = "normalization"
ELEMENTWISE = "elementwise"
_CLASSES = {
    COMPILED: r"^(void )?triton_(?!tem|mm)",  # what it fused is in its name, and often several classes
    "attention": r"flash_|fmha|sdpa|Flash(Attn|Attention)",
    "layout": r"(nchw|ncdhw|nhwc|ndhwc)(To|2)(folded)?(nchw|ncdhw|nhwc|ndhwc)\w*kernel|batched_transpose_|AddPadding"
    r"|transpose_readWrite",
    NORMALIZATION: r"batch_?norm|(?<![a-z])bn_(fw|bw)|layer_?norm|group_?norm|rms_?norm|instance_?norm|bnorm"
    r"|RowwiseMoments|GammaBeta|cudnn_bn|BatchNorm",
    "pooling": r"(max|avg|average|adaptive)_?\w*_?pool|pooling_(fw|bw)",
    "products and convolutions": r"gemm|Cijk_|gemv|cudnn|conv|wgrad|dgrad|fprop|winograd|nvjet|triton_(tem|mm)|split_?K"
    r"|fft2d|flip_filter|cublas|cutlass|dot_kernel|xmma|cask|mma_|wmma",
    "optimizer": r"multi_tensor_apply|fused_?(adam|sgd)|FusedOptimizer",
    "reduction": r"reduce|softmax|nll_loss|cross_entropy|SoftMax|_norm_kernel|cumsum|\bscan|topk",
    "indexing": r"index|indices|embs|gather|scatter|embedding|sort|CatArray|nonzero|masked",
    ELEMENTWISE: r"elementwise|pointwise|dropout|distribution|fill|copy|CUDAFunctor|launch_clamp|Memset|arange",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _CLASSES.items()}


@functools.lru_cache(maxsize=100_000)
def kernel_class(kernel: str) -> str:
    """Return what a kernel does, by its name: a key of `_CLASSES`, or "other"."""
    products = uses_tensor_cores(kernel) or multiplies_float32(kernel)
    classes = (name for name, pattern in _PATTERNS.items() if pattern.search(kernel))
    found = next(classes, "other")
    return "products and convolutions" if products and found not in ("attention", COMPILED) else found


# Occupancy.

# Blocks that may be resident on a multiprocessor, by compute capability. CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability": 12.9 for 5.0 to 7.2, 13.1 for 7.5 and later.
MAX_BLOCKS = {
    **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 0), (7, 2)], 32),
    (7, 5): 16,
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    **dict.fromkeys([(9, 0), (10, 0), (10, 3)], 32),
    **dict.fromkeys([(11, 0), (12, 0), (12, 1)], 24),
}

# How registers and shared memory are allocated, from compute capability 5.0 to 12.1: `cuda_occupancy.h` of CUDA.
_REGISTERS_AT_ONCE = 256  # per warp
_PARTITIONS = {(6, 0): 2}  # of a multiprocessor, each with its part of the registers; otherwise 4
_SHARED_MEMORY_AT_ONCE = dict.fromkeys([5, 6, 7], 256)  # bytes, by major compute capability; otherwise 128
_RESERVED_SHARED_MEMORY = 1024  # bytes of each block, for the system, from compute capability 8.0 on
_WARP = 32  # threads
_PROPERTIES = ["computeMajor", "computeMinor", "numSms", "maxThreadsPerMultiprocessor", "regsPerMultiprocessor"]
_PROPERTIES += ["sharedMemPerMultiprocessor", "warpSize"]


def estimated_occupancy(
    grid: Sequence[int] | None,
    block: Sequence[int] | None,
    registers: float,
    shared_memory: float,
    device: dict[str, Any] | None,
) -> float:
    """Return the share of a multiprocessor's threads that a kernel keeps resident in %, or NaN if unknown.

    PyTorch's profiler writes its own estimate into the trace. It is 0 for every kernel with more than 48 KiB of shared
    memory. Such a kernel must request the memory; the profiler ignores this, and concludes that the kernel cannot run.

    The number of blocks resident on a multiprocessor is limited by the multiprocessor's part of the grid, its threads,
    registers, shared memory and limit of blocks. The estimate assumes that the grid is evenly spread.

    `grid` and `block` are the blocks of the grid and the threads of a block, three int each; `registers` are per
    thread; `shared_memory` is per block, static and dynamic, in bytes; `device` is the device's entry of the trace's
    ``deviceProperties``.

    NaN if a parameter is None or not a number, if the entry lacks a property (AMD's entries do), if the compute
    capability is unknown, or if the device could not run such a kernel.
    """
    if not (isinstance(grid, list) and isinstance(block, list) and device):
        return math.nan
    numbers = (*grid, *block, registers, shared_memory, *map(device.get, _PROPERTIES))
    if not all(isinstance(each, Real) and math.isfinite(each) for each in numbers):
        return math.nan
    blocks, threads = math.prod(grid), math.prod(block)
    major, minor, multiprocessors, max_threads, max_registers, max_shared_memory, warp = numbers[-len(_PROPERTIES) :]
    if (major, minor) not in MAX_BLOCKS or warp != _WARP or min(multiprocessors, max_threads, blocks, threads) <= 0:
        return math.nan
    warps = math.ceil(threads / _WARP)
    limits = [MAX_BLOCKS[major, minor], max_threads // (_WARP * warps)]
    if registers > 0:
        of_warp = _round_up(registers * _WARP, _REGISTERS_AT_ONCE)
        partitions = _PARTITIONS.get((major, minor), 4)
        limits.append(max_registers // partitions // of_warp * partitions // warps)
    of_block = shared_memory + (_RESERVED_SHARED_MEMORY if major >= 8 else 0)
    if of_block > 0:
        limits.append(max_shared_memory // _round_up(of_block, _SHARED_MEMORY_AT_ONCE.get(major, 128)))
    resident = min(blocks / multiprocessors, *limits)
    return 100 * resident * threads / max_threads or math.nan


def _round_up(value: float, multiple: int) -> float:
    return -(-value // multiple) * multiple
