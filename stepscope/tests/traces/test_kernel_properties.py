"""Kernels known by their names, and the occupancy that their launch allows."""

import math

import pytest
from support import cuda_trace

from stepscope.traces import kernel_properties

# Kernels' names as other people's profiles show them, long ones cut at …: Holistic Trace Analysis's and TraceLens's
# test data, Kineto's samples, nanochat, TensorRT's lists of tactics, issues of PyTorch, cuDNN, vLLM and SGLang.
TENSOR_CORES = [
    "volta_h884gemm_64x64_nt",
    "volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1",
    "Volta_hmma_implicit_gemm_fprop_fp32_nhwc_128x128x64x1_1x3x3x0x1",
    "void cutlass::Kernel<cutlass_70_wmma_tensorop_f16_s161616gemm_f16_32x32_64x2_tn_align8>(cutlass_70_wmma_…)",
    "turing_fp16_s1688gemm_fp16_128x64_sliced1x2_ldg8_f2f_tn",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t, …>::Params)",
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn",
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4"
    "_warpsize2x2x1_g1_tensor16x8x8_alignc4_execute_kernel__5x_cudnn",
    "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMulti"
    "stageINS_4gemm9GemmShapeILi64ELi128ELi32EEENS6_4warp11MmaTensorOpINS7_ILi32ELi64ELi32EEESC_SQ_SC_S11_fNSO_8",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>…",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<96, 64, 128, 8> >",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, …>::Params)",
    "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_6_128x64x64_4x1x1_cga1x1x1_kernel0_0",
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x32_stage3_warpsize2x2x1_tensor16x8x8_execute_kernel…",
    "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_warpgroupsize1x1x1_g1",
    "sm90_xmma_gemm_f64f64_f64f64_f64_nt_n_tilesize128x128x16_stage3_warpsize4x2x1_tensor16x8x16",
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_1x1x1_0_tnn_align8_warpspecialized",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd…",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 2112u, 7168u, 1u, 128u, 112u, 128u, 128u, 4u, 8u, 128u, 1u>(…)",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4, cute::tuple<…>…",
    "cutlass3x_sm100_bstensorop_s128x128x64gemm_block_scaled_ue8m0xe2m1_ue8m0xe2m1_f32_void_f16_128x128x256",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensorptrbf16gmem",
]
FLOAT32 = [
    "volta_sgemm_128x64_nn",
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int, int, int, float…)",
    "void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x32_8x5_nn_align1:…",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n...",
    "void gemmSN_TN_kernel_64addr<float, 128, 16, 2, 4, 8, 9, false, cublasGemvTensorStridedBatched<float const>…)",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*, int, …)",
    "void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*, int, float*, …)",
]
CONVERSIONS = [cuda_trace.CONVERSION, "void nhwcToNchwKernel<__half, __half, float, true, false>(…)"]
OTHERS = [
    "volta_gcgemm_32x32_nt",
    "cask_cudnn_train::computeWgradSplitKOffsetsKernel(cask_cudnn_train::ComputeSplitKOffsetsParams)",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm70(PyTorchMemEffAttention::AttentionKernel<float, …>::Params)",
    "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4"
    "_warpsize2x2x1_g1_tensor16x8x8_execute_split_k_kernel_cudnn_train",
    "void cutlass_cudnn_train::Kernel<cutlass_cudnn_train::reduction::kernel::ReduceSplitK<cutlass_cudnn_train::M…",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*…",
    "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(…)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<96, 64, 128, 8, 2, 4, 4> >(…)",
    "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4> >(…)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>(…)",
    "void flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128> >, 5, 256, 1, false, true, float>(…)",
    "triton_tem_fused_addmm_relu_t_1",  # names of Triton's kernels do not show whether they use Tensor Cores
    "matmul_kernel_tma_persistent",
]


@pytest.mark.parametrize(
    ("known", "names"),
    [("uses_tensor_cores", TENSOR_CORES), ("multiplies_float32", FLOAT32), ("converts_layout", CONVERSIONS)],
)
def test_kernels_are_known_by_their_names(known, names):
    known = getattr(kernel_properties, known)
    assert [name for name in [*TENSOR_CORES, *FLOAT32, *CONVERSIONS, *OTHERS] if known(name)] == names


# Names of kernels on an H200 (ResNet-50 in bfloat16, a small network in float32), a V100 and an A100
CLASSES = {
    "normalization": [
        "void at::native::batch_norm_collect_statistics_channels_last_kernel<at::native::Var, c10::BFloat16, float…",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*…",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*…",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array…",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::…",
    ],
    "pooling": ["void at::native::(anonymous namespace)::max_pool_backward_nhwc<c10::BFloat16, float>(…"],
    "layout": [
        "void nhwcAddPaddingKernel<__nv_bfloat16, __nv_bfloat16, float, true, (cudnnKernelDataType_t)0>(int…",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t…",
    ],
    "products and convolutions": [
        "nvjet_sm90_tst_128x128_64x6_1x2_h_bz_splitK_NTT",
        "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0_AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_EPS0…",
        "void fft2d_r2c_32x32<float, false, 1u, false>(float2*, float const*, int, int, int, int, int, int, int, int…",
        "sm80_xmma_gemm_cf32cf32_f32f32_cf32_tn_n_tilesize32x32x8_stage3_warpsize2x2x1_ffma_aligna8_alignc8_execute…",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>(…)",
        "sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x128x64_warp…",
    ],
    "attention": ["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, half>…"],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::nat…",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 4, true, false>(float*, float const*…",
    ],
    "optimizer": ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespac…"],
    "indexing": [
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, lon…"
    ],
    "compiled": ["triton_poi_fused__native_batch_norm_legit_functional_relu_5"],
    "other": ["my_extension::scale(float*, float, int)"],
}


@pytest.mark.parametrize("name", CLASSES)
def test_kernels_have_the_class_of_what_they_do(name):
    assert {kernel: kernel_properties.kernel_class(kernel) for kernel in CLASSES[name]} == dict.fromkeys(
        CLASSES[name], name
    )


A100 = {
    "id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108, "warpSize": 32,
    "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 167936,
}  # fmt: skip
V100 = A100 | {"name": "Tesla V100-SXM2-32GB", "computeMajor": 7, "numSms": 80, "sharedMemPerMultiprocessor": 98304}
P100 = V100 | {"name": "Tesla P100-SXM2-16GB", "computeMajor": 6, "numSms": 56, "sharedMemPerMultiprocessor": 65536}


@pytest.mark.parametrize(
    ("device", "grid", "block", "registers", "shared_memory", "expected"),
    [
        (A100, [108, 8, 1], [256, 1, 1], 16, 0, 100),  # all 8 blocks of a multiprocessor, 2048 threads
        (A100, [27, 1, 1], [256, 1, 1], 16, 0, 3.125),  # a quarter of a block a multiprocessor: 64 threads of 2048
        (A100, [9999, 1, 1], [32, 1, 1], 16, 0, 50),  # 32 blocks are the limit, of a warp each
        (V100, [9999, 1, 1], [256, 1, 1], 128, 0, 25),  # 16384 registers for 4 warps, in each of 4 partitions
        (V100, [9999, 1, 1], [128, 1, 1], 50, 0, 56.25),  # 50 × 32 registers are given out as 1792: 9 warps a partition
        (V100, [9999, 1, 1], [128, 1, 1], 16, 24 << 10, 25),  # 96 KiB hold 24 KiB four times
        (P100, [9999, 1, 1], [64, 1, 1], 88, 0, 34.375),  # 2816 registers for 11 warps, in each of 2 partitions
        (P100, [9999, 1, 1], [128, 1, 1], 16, 10880, 31.25),  # 64 KiB hold five times 10880, rounded up to 11008
        (A100, [9999, 1, 1], [128, 1, 1], 16, 41 << 10, 18.75),  # 164 KiB hold 41 KiB and the system's 1 KiB 3 times
        (A100, [9999, 1, 1], [128, 1, 1], 16, 80 << 10, 12.5),  # more than 48 KiB is possible: two blocks
        (A100 | {"computeMinor": 9, "maxThreadsPerMultiprocessor": 1536}, [9999, 1, 1], [32, 1, 1], 16, 0, 50),
    ],
)
def test_occupancy_is_limited_by_the_scarcest_resource(device, grid, block, registers, shared_memory, expected):
    occupancy = kernel_properties.estimated_occupancy(grid, block, registers, shared_memory, device)
    assert occupancy == pytest.approx(expected)


@pytest.mark.parametrize(
    "device",
    [
        None,
        {"name": "AMD Radeon Graphics", "computeMajor": 9, "computeMinor": 0, "warpSize": 64, "numSms": 104},
        A100 | {"computeMajor": 99},
        A100 | {"sharedMemPerMultiprocessor": 40 << 10},  # the kernel could not have run on it
    ],
    ids=["no properties", "AMD", "unknown architecture", "another device"],
)
def test_without_the_devices_properties_occupancy_is_unknown(device):
    assert math.isnan(kernel_properties.estimated_occupancy([9999, 1, 1], [128, 1, 1], 16, 80 << 10, device))
