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
    assert (gather.collective, gather.size_bytes, gather.ranks) == ("_allgather_base", 160, 8)
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
    assert (new.gpu, new.rank, new.ranks) == ("", -1, 0)


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


@pytest.mark.parametrize(("name", "kind"), [
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn_align8>", "gemm"),
    ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT", "gemm"), ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "gemm"),
    ("triton_tem_fused_mm_12", "gemm"), ("triton_poi_fused_add_mul_3", "memory_bound"),
    ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, cutlass::half_t>>", "attention"),
    ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
    ("void scaled_upper_triang_masked_softmax_warp_forward<__half, __half, float, 11>", "attention"),
    ("ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclDevComm*)", "communication"),
    ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>>", "optimizer"),
    ("void at::native::layer_norm_kernel", "memory_bound"), ("", "memory_bound"),
])
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert class_of(Ran(name, False, 7, 0.0, 1.0, 0.0)) == kind


@pytest.mark.parametrize(("kernel", "collective", "kind"), [
    ("ncclKernel_AllReduce_TREE_LL_Sum_float(ncclDevComm*)", "", "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "", "reduce_scatter"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "", "reduce"), ("ncclDevKernel_SendRecv", "all_to_allv", "all_to_all"),
    ("ncclDevKernel_SendRecv", "", "send_recv"), ("ncclDevKernel_Generic_4", "", "other"),
    ("ncclDevKernel_Generic_4", "_reduce_scatter_base", "reduce_scatter"),
])
def test_collectives_are_told_apart(kernel: str, collective: str, kind: str) -> None:
    assert collective_of(Ran(kernel, False, 7, 0.0, 1.0, 0.0, collective=collective)) == kind


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
