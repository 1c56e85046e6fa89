"""Finds out from a kernel's name what kind of work it does: whether on Tensor Cores, in float32, or on a layout.

NVIDIA's libraries name their kernels after the instruction that they multiply with. The families below were collected
from these sources, and are tested on names that real profiles show:

- PyProf, `prof/tc.py`, NVIDIA's own list, which TensorBoard's profiler tab copied; XProf's `kernel_stats_utils.cc` has
  the same one. Both end with Turing and count every `xmma_gemm`, even those that multiply with `ffma`.
- "CUTLASS Profiler" in CUTLASS's documentation: names hold the operator class, `tensorop`, `wmma_tensorop` or `simt`,
  and the shape of the instruction, m16n8k16 as `16816`; `cutlass/arch/mma_sm*.h` has the shapes.
- cuBLAS and cuDNN in public profiles: `volta_…`, `turing_…`, `ampere_…`, `sm80_xmma_…`, `nvjet_…`,
  `cudnn_generated_fort_native_sdpa_…`.
- FlashAttention 2 to 4 and DeepGEMM: their kernels' names in the source. PyTorch's memory-efficient attention:
  `gemm_kernel_utils.h`, which gives float32 the Tensor Cores from compute capability 8.0 on (three times TF32).
"""

from __future__ import annotations

import functools
import re

# Shapes of the mma instructions, from Volta's m8n8k4 to Ampere's m16n8k256.
_SHAPES = "884|1684|1688|8816|8832|16816|16832|16864|88128|161616|168128|168256"

_TENSOR_CORES = re.compile(
    "|".join(
        (
            # cuBLAS, cuDNN, CUTLASS 2: the type, the instruction's shape, the operation: s16816gemm, i8816cudnn.
            rf"(?<![a-z0-9])[bcdhisz]({_SHAPES})(?=[a-z_])",
            # cuDNN, cuBLAS: the mma instruction by its name, as in Volta_hmma_implicit_gemm, flash_fprop_wgmma_f16.
            r"(?<![a-z])(w|wg|g|hg|ig|qg|h|i|d|b|q|u)mma(?![a-z])",
            # cuDNN, cuBLAS, TensorRT from Volta on: sm80_xmma_fprop_implicit_gemm_…, and without the architecture.
            r"(?<![a-z0-9])sm(7[0-9]|[89][0-9]|1[0-9][0-9])_xmma_(sparse_|warp_specialized_)?"
            r"(gemm|fprop|dgrad|wgrad|implicit_gemm|conv)",
            r"(?<![a-z0-9])xmma_(sparse_|warp_specialized_)?(gemm|implicit_gemm|conv)",
            r"(?<![a-z0-9])nvjet_",  # cuBLAS from Hopper on
            r"(?<![a-z0-9])cudnn_generated_fort_native_sdpa_",
            # CUTLASS: the operator class, in the names of its library and in those of its C++ types.
            r"tensorop_",
            r"(?-i:(Mma|OpClass|OpClassWmma)TensorOp|Mainloop\w*(Gmma|Umma))",
            r"(?-i:(?<![A-Za-z0-9])SM\d+(::GMMA::MMA)?_\d+x\d+x\d+_[A-Z]+\d)",
            # FlashAttention: not those that prepare, combine or convert.
            r"flash_(fwd(_splitkv(_mla)?)?|bwd_dq_dk_dv_loop(_seqk_parallel)?)_kernel(?!_traits)",
            r"Flash(Attn(Fwd|Bwd)|Attention(Forward|Backward))Sm\d+",
            r"fmha_cutlass[FB]_(f16|bf16)_\w+_sm(70|75|80)",
            r"fmha_cutlass[FB]_f32_\w+_sm80",
            r"(?<![a-z0-9])fmha_(fprop|dgrad|v2|fwd_loop|bwd_dq_dk_dv_loop)_",  # Apex, TensorRT, FlashAttention 1
            r"deep_gemm::\w*gemm",
            # cuDNN 7, as NVIDIA's list has them.
            r"dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv2d_c1_k1|(?<![a-z0-9])conv1x1|direct_group",
        )
    ),
    re.IGNORECASE,
)

# What names a CUDA core's instruction, or multiplies nothing, though it belongs to one of these families.
_OTHERS = re.compile(
    "|".join(
        (
            r"(?<![a-z])simt(?![a-z])|MmaSimt|OpClassSimt",
            r"(?<![a-z])[dfhi]fma2?(?![a-z])",  # fused multiply-add: …_ffma_aligna4_alignc4_…
            # All of float32, with the instruction left out of the name or cut off. TF32 says so: tf32f32.
            r"xmma_\w*?_f32f32_f32f32_f32(?!\w*(tensor|warpgroup|mma))",
            # Adds the parts of a sum: runs after the kernel whose name it bears, in 6 µs after 92 µs on an A100.
            r"execute_split_k_kernel|splitK_?reduce|ReduceSplitK",
            r"^(void )?triton_",
        )
    ),
    re.IGNORECASE,
)


# Matrix products and convolutions of cuBLAS, cuDNN, CUTLASS and MAGMA on numbers of 32 bits. BLAS calls them s, for
# single: volta_sgemm_128x64_nn, cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1, cutlass_80_simt_sgemm_…. Today's
# names hold the types of both factors, the sum and the result: f32f32_f32f32_f32.
_FLOAT32_PRODUCT = re.compile(
    r"(?<![a-z0-9])(sgemm|scudnn)|(?<=simt_)sgemm"
    r"|convolve_sgemm<float|sgemm\w*kernel<float|gemm\w*kernel\w*<float"
    r"|(dgrad|wgrad_alg\d|fprop|convolve_common)\w*engine\w*<float|winograd\w*<float"
    r"|_f32f32_f32f32_f32(?![a-z0-9])"
    r"|gemv\w*<int, int, float|gemmSN_\w+<float",
    re.IGNORECASE,
)

# cuDNN converts an image batch from NCHW to NHWC and back by kernels of their own; MIOpen transposes it. A
# convolution's own name may say nhwc2nchw; then the conversion is a part of it.
_LAYOUT_CONVERSION = re.compile(
    r"(?<![a-z0-9])(nchw|ncdhw|nhwc|ndhwc)To(folded)?(nchw|ncdhw|nhwc|ndhwc)\w*kernel"
    r"|(?<![a-z0-9])batched_transpose_\d+x\d+",
    re.IGNORECASE,
)


@functools.lru_cache(maxsize=100_000)
def uses_tensor_cores(kernel: str) -> bool:
    """Return whether a kernel's name says that it computes on Tensor Cores.

    False also where the name does not show it: Triton's kernels (``triton_…``, or named as the reader's own function)
    use them for ``tl.dot``, and are named alike whether they do or not. So a share of Tensor-Core time is a lower bound
    for code that went through ``torch.compile``. The name may be demangled or not.

    Examples
    --------
    >>> uses_tensor_cores("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn")
    True
    >>> uses_tensor_cores("ampere_sgemm_128x64_nn")
    False
    """
    return _TENSOR_CORES.search(kernel) is not None and _OTHERS.search(kernel) is None


@functools.lru_cache(maxsize=100_000)
def multiplies_float32(kernel: str) -> bool:
    """Return whether a kernel's name says that it multiplies matrices, or convolves, in float32 without Tensor Cores.

    Examples
    --------
    >>> multiplies_float32("volta_sgemm_128x64_nn")
    True
    >>> multiplies_float32("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn")
    False
    """
    return _FLOAT32_PRODUCT.search(kernel) is not None and not uses_tensor_cores(kernel)


@functools.lru_cache(maxsize=100_000)
def converts_layout(kernel: str) -> bool:
    """Return whether a kernel's name says that all it does is to change the memory format of images.

    Examples
    --------
    >>> converts_layout("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(…)")
    True
    """
    return _LAYOUT_CONVERSION.search(kernel) is not None
