"""Finds out from a kernel's name what kind of work it does, where that matters for its speed.

The names were collected like those in `tensor_cores`: from public profiles and the libraries' own sources.
"""

from __future__ import annotations

import functools
import re

from helpers.traces.tensor_cores import uses_tensor_cores

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
