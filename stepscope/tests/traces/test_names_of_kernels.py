"""Kernels known by their names, and what exposed copies sum up to."""

import pytest
from support import cuda_trace

from stepscope import traces


def test_exposed_copies_are_those_of_the_breakdown_by_their_names(tmp_path):
    table = traces.exposed_copies(cuda_trace.write(tmp_path / "trace.json"))
    expected = {"Memcpy HtoD (Pinned -> Device)": 100, "Memcpy DtoH (Device -> Pageable)": 5}
    assert table.mean().to_dict() == expected
    assert sum(expected.values()) == cuda_trace.BREAKDOWN["Memcpy"]


# Kernels' names as public profiles show them: Kineto's samples and Holistic Trace Analysis's test data (V100, A100);
# cuBLAS on H100.
FLOAT32 = [
    "volta_sgemm_128x64_nn",
    "ampere_sgemm_128x128_tn",
    "volta_scudnn_128x128_stridedB_splitK_medium_nn_v1",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int, int, int, float…)",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*, int, …)",
    "void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*, int, float*, …)",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(T1::Params)",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel…",
]
NOT_FLOAT32 = [
    cuda_trace.TENSOR_CORE_PRODUCT,
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>(cutlass_80_tensorop_s1688gemm…)",
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
    "nvjet_tst_112x64_64x9_2x1_v_bz_bias_TNN",
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x32_stage3_warpsize2x2x1_tensor16x8x8_execute_kernel…",
    "ampere_gcgemm_64x64_nt",
    "void at::native::vectorized_elementwise_kernel"
    "<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*…)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
]


@pytest.mark.parametrize(
    ("name", "known"), [*((name, True) for name in FLOAT32), *((name, False) for name in NOT_FLOAT32)]
)
def test_products_in_float32_are_known(name, known):
    assert traces.multiplies_float32(name) is known


def test_layout_conversions_are_known():
    assert traces.converts_layout(cuda_trace.CONVERSION)
    assert traces.converts_layout("void nhwcToNchwKernel<__half, __half, float, true, false>(…)")
    assert not traces.converts_layout("void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(…)")
    assert not traces.converts_layout("volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1")
