"""Traces of PyTorch's profiler, new and old, whole and broken."""

from __future__ import annotations

import gzip
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import UserError
from sim.traces.classes import class_of, collective_of
from sim.traces.kineto import Ran, read_trace

#: As torch 2.4 writes them; the second is launched by the backward's thread inside the optimizer's annotation.
EVENTS: list[dict[str, Any]] = [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 100.0, "dur": 90.0, "args": {}},
    {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 150.0, "dur": 20.0, "args": {}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 110.0, "dur": 9.0,
     "args": {"External id": 5, "Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 112.0, "dur": 4.0,
     "args": {"correlation": 71, "External id": 5}},
    {"ph": "X", "cat": "kernel", "name": "ampere_bf16_s16816gemm_bf16_128x64", "ts": 130.0, "dur": 10.0,
     "args": {"stream": 7, "device": 1, "correlation": 71, "External id": 5}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 160.0, "dur": 4.0,
     "args": {"correlation": 72}},
    {"ph": "X", "cat": "kernel", "name": "multi_tensor_apply_kernel<...>", "ts": 165.0, "dur": 5.0,
     "args": {"stream": 7, "device": 1, "correlation": 72, "External id": 6}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 170.0, "dur": 1.0,
     "args": {"stream": 7, "device": 1, "correlation": 73, "bytes": 4}},
    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(x)", "ts": 140.0, "dur": 8.0,
     "args": {"stream": 20, "device": 1, "correlation": 74, "Collective name": "_allgather_base",
              "In msg nelems": 10, "Out msg nelems": 80, "Group size": 8, "dtype": "BFloat16"}},
    {"ph": "i", "name": "instant"}, {"ph": "X", "cat": "kernel", "name": "no time"},
    {"ph": "X", "cat": "kernel", "name": "bad time", "ts": "soon", "dur": 1},
]
HEAD = {"deviceProperties": [{"id": 0, "name": "other"}, {"id": 1, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 16}}


def write(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def test_what_ran_is_read_with_who_launched_it(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "t.json", {**HEAD, "traceEvents": EVENTS}))
    assert (found.gpu, found.rank, found.ranks) == ("NVIDIA H100 80GB HBM3", 3, 16)
    assert found.steps == ((4, 100.0, 190.0),)
    product, gather, update, copy = found.ran
    assert (product.op, product.shapes, product.dtype, product.launched_us) == (
        "aten::mm", ((64, 32), (32, 16)), "c10::BFloat16", 112.0)
    assert (gather.collective, gather.size_bytes, product.call) == ("_allgather_base", 160, 5)
    assert [class_of(one) for one in found.ran] == ["gemm", "communication", "optimizer", "copy"]
    assert collective_of(gather) == "all_gather" and update.updating and not product.updating and copy.copy


def test_old_traces_and_compressed_ones_are_read_alike(tmp_path: Path) -> None:
    names = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    old = [{**event, "cat": names.get(event.get("cat", ""), event.get("cat", "")),
            "args": {"external id" if key == "External id" else key: value
                     for key, value in event.get("args", {}).items()}} for event in EVENTS]
    new = read_trace(write(tmp_path / "new.json", {"traceEvents": EVENTS}))
    (tmp_path / "old.json.gz").write_bytes(gzip.compress(json.dumps(old).encode()))
    assert read_trace(str(tmp_path / "old.json.gz")).ran == new.ran
    assert (new.gpu, new.rank, new.ranks, new.devices) == ("", -1, 0, (1,))


def test_what_some_profilers_write_is_read_all_the_same(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS}).replace('"instant"', '"a\tb"').replace('"bytes": 4', '"bytes": N/A')
    (tmp_path / "t.json").write_text(text.replace("\\t", "\t"))
    assert len(read_trace(str(tmp_path / "t.json")).ran) == 4


def test_optimizers_inside_optimizers_are_one(tmp_path: Path) -> None:
    inner = {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#Inner.step", "ts": 151.0, "dur": 2.0,
             "args": {}}
    found = read_trace(write(tmp_path / "t.json", {"traceEvents": [*EVENTS, inner]}))
    assert found.updates == ((150.0, 170.0),) and found.ran[2].updating


@pytest.mark.parametrize(("raw", "words"), [
    (b"{", "is not JSON"), (b"\xff\xfe\x00", "is not JSON"), (b"{}", "no 'traceEvents'"), (b"7", "no 'traceEvents'"),
    (b'{"traceEvents": []}', "nothing of a GPU"), (gzip.compress(b"{}" * 99, mtime=0)[:20], "cut off or damaged"),
    (b"[" * 100_000, "is not JSON"),
])
def test_what_is_no_trace_is_refused(raw: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(raw)
    with pytest.raises(UserError, match=words):
        read_trace(str(tmp_path / "t.json"))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="is a folder"):
        read_trace(str(tmp_path))


#: Kernels as traces have them, by what they are. Norms and scaling of lists of tensors are clipping, which a prediction
#: counts with the optimizer.
KERNELS: dict[str, list[str]] = {
    "memory_bound": [
        ("void at::native::vectorized_elementwise_kernel<4, "
         "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
         "at::native::GeluType)::{lambda()#1}::operator()() const::{lambda()#2}::operator()() "
         "const::{lambda(float)#1}, at::detail::Array<char*, 2> >(int, ...)"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direc"
         "t_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
         "const::{lambda()#12}::operator()() "
         "const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int, ...)"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
         "at::native::func_wrapper_t<float, at::native::sum_functor<float, float, "
         "float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4> >"),
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(...)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<...>",
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
         "namespace)::TensorListMetadata<2>, at::native::(anonymous "
         "namespace)::UnaryOpFunctor<...CopyFunctor..."),
        "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel<...>",
        "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>",
        "triton_poi_fused__scaled_dot_product_flash_attention_transpose_3",
        "triton_per_fused__scaled_dot_product_efficient_attention_backward_add_mul_sum_9",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_clone_2",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4",
        "triton_poi_fused_add_addmm_gelu_3",
        "triton_poi_fused_mm_silu_mul_3",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>",
        "void cudnn::batchnorm_bwtr_nhwc_semiPersist<...>",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>",
        "void cublasLt::epilogue::globalKernel_bgrad",
        "void flash_attn::dropout_layer_norm",
        "reshape_and_cache_flash_kernel",
        "triton_poi_fused__flash_attention_forward_view",
        "void transformer_engine::fused_attn::thd_read_half_tensor",
        "transformer_engine::fused_rope_forward_kernel",
        "void softmax_warp_forward<c10::BFloat16",
        "void cunn_SoftMaxForward<8, float, float",
        "void vllm::topk_softmax<...>",
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex",
    ],
    "optimizer": [
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
         "namespace)::TensorListMetadata<1>, at::native::(anonymous "
         "namespace)::LpNormFunctor<c10::BFloat16, (at::native::NormType)1, ...>"),
        "void transformer_engine::multi_tensor_apply_kernel<...AdamFunctorMaster",
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, ScaleFunctor<float, float>",
        "void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>",
        "void multi_tensor_apply_kernel<...> amp_foreach_non_finite_check",
        "void kOptimizer32bit1State<float, 5>",
        "void kPreconditionOptimizerStatic8bit2State<float,0>",
        "void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 0, 256, 1>",
        "void kOptimizer32bit2State<float, 0>",
    ],
    "gemm": [
        "triton_tem_fused__to_copy_mm_t_1",
        "triton_tem_fused_addmm_relu_12",
        "triton_mm",
        "triton_tem_fused__unsafe_view_mm_0",
        "Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1",
        "Cijk_Alik_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB1",
        "turing_fp16_s1688cudnn_fp16_256x64_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "ampere_fp16_s16816cudnn_fp16_128x128_ldg8_relu_f2f_stages_32x5_nhwc_tn_v1",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",
        "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false>",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>",
        "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 3, 4, false>",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, true>",
        "gemvx::kernel<int, int, __nv_bfloat16>",
        "void dot_kernel<float, 128, 0>",
        "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT",
        "nvjet_sm103_qqtst_128x256",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>",
        "cutlass3x_sm100_tensorop_s256x256x16gemm",
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::G"
         "emmUniversal<...GroupedMM"),
        "void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>",
    ],
    "attention": [
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_1",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits",
        "void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<",
        "void cutlass::device_kernel<flash::FlashAttnBwdSm90<...>",
        "void pytorch_flash::flash_fwd_kernel<...",
        "void PyTorchMemEffAttention...",
        "attn_fwd.kd",
        "attn_fwd_0.kd",
        "bwd_kernel_dk_dv",
        "bwd_kernel_fuse.kd",
        "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<...>",
        "_ZN5aiter24fmha_fwd_hd128_bf16_causalE",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100",
        "fmhaSm100fKernel_QkvE4m3",
        "_attn_fwd",
        "_attn_bwd_dkdv",
        "_attn_bwd_preprocess",
        "_fwd_kernel",
        "_bwd_preprocess_do_o_dot",
        "BatchPrefillWithRaggedKVCacheKernel",
        "void paged_attention_v2_kernel",
    ],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL",
        "void ncclKernel_AllReduce",
        "ncclSymkDevKernel_AllGather_STMC",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>",
        "void two_shot_all_reduce_kernel<c10::BFloat16>",
        "void one_shot_all_reduce_kernel",
        "multimem_all_gather_kernel",
        "void deep_ep::intranode::dispatch<8, 768>",
        "void deep_ep::internode::combine<...>",
        "kuserbuffers_pushrecv",
        "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop",
        "mscclKernel_Sum_half_LL",
        "c10d::symmetric_memory barrier_kernel",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel",
        "allreduce_fusion_kernel_oneshot_lamport",
        "nvshmem_barrier",
    ],
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in KERNELS.items() for name in names] + [
    ("", "memory_bound"),
    ("void scaled_upper_triang_masked_softmax_warp_forward<__half, __half, float, 11>", "attention"),
])
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert class_of(Ran(name, False, 0.0, 1.0, 0.0)) == kind


@pytest.mark.parametrize(("name", "kind"), [
    ("Memcpy HtoD (Pageable -> Device)", "copy"), ("Memcpy DtoH (Device -> Pinned)", "copy"),
    ("Memcpy DtoD (Device -> Device)", "memory_bound"), ("Memset (Device)", "memory_bound"),
    ("Memcpy PtoP (Device -> Device)", "communication"), ("CopyHostToDevice", "copy"),
])
def test_copies_are_told_apart(name: str, kind: str) -> None:
    assert class_of(Ran(name, True, 0.0, 1.0, 0.0)) == kind


@pytest.mark.parametrize(("kernel", "collective", "kind"), [
    ("ncclKernel_AllReduce_TREE_LL_Sum_float(ncclDevComm*)", "", "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "", "reduce_scatter"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "", "reduce"), ("ncclDevKernel_SendRecv", "all_to_allv", "all_to_all"),
    ("ncclDevKernel_SendRecv", "", "send_recv"), ("ncclDevKernel_Generic_4", "", "other"),
    ("ncclDevKernel_Generic_4", "_reduce_scatter_base", "reduce_scatter"),
    ("ncclDevKernel_AllGather_RING_LL", "coalesced", "all_gather"), ("ncclDevKernel_SendRecv", "gather", "other"),
    ("ncclDevKernel_Broadcast_RING_LL", "_allgather_base", "all_gather"),
    ("void ncclKernel_AllReduce(x)", "", "all_reduce"),
    ("ncclDevKernel_SendRecv", "coalesced", "send_recv"),
])
def test_collectives_are_told_apart(kernel: str, collective: str, kind: str) -> None:
    assert collective_of(Ran(kernel, False, 0.0, 1.0, 0.0, collective=collective)) == kind


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
                    max_leaves=20)
KEYS = st.sampled_from(["ph", "cat", "name", "ts", "dur", "args", "traceEvents"])
EVENT = st.dictionaries(KEYS, JSON | st.sampled_from(["X", "kernel", "ProfilerStep#1", "cpu_op"]), max_size=7)


@given(st.lists(EVENT | JSON, max_size=6), st.dictionaries(
    st.sampled_from(["deviceProperties", "distributedInfo"]), JSON, max_size=2))
def test_no_text_makes_it_fail_but_with_an_error_for_users(events: list[Any], head: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "t.json", {**head, "traceEvents": events})
        with suppress(UserError):
            read_trace(file)
