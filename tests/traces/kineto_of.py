"""A trace as Kineto writes one, of what a prediction says: names and arguments of real kernels, calls and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.report.result import Result
from sim.report.trace import trace

SMALL = {"name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "gpt2"},
         "training": {"micro_batch": 1, "global_batch": 32, "sequence": 1024, "precision": "fsdp-bf16"},
         "parallel": {"strategy": "fsdp"}}
NAMES = {
    "gemm": "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn",
    "attention": "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
    "memory_bound": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
    "optimizer": "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdam>",
}
COLLECTIVES = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                       "_reduce_scatter_base"),
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
    "all_to_all": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_allv"),
    "broadcast": ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
    "send": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send"),
    "recv": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "recv"),
}


def kineto_of(result: Result, steps: int = 3, shapes: bool = True, marks: bool = True,
              name_of: Callable[[str], str] | None = None) -> dict[str, Any]:
    """The critical rank's step, `steps` times over; host events run 5 ms ahead of the GPU."""
    drawn = [event for event in trace(result, 3_000_000)["traceEvents"]
             if event["ph"] == "X" and event["pid"] == result.detail.critical]
    events: list[dict[str, Any]] = []
    length = result.step_time_s * 1e6
    for step in range(steps):
        shift = 10_000.0 + step * length
        if marks:
            events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step + 3}", "pid": 1, "tid": 1,
                           "ts": shift - 5001.0, "dur": length - 1.0, "args": {}})
        for event in drawn:
            events += _event(event, shift, len(events), shapes)
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": result.gpus}, "traceEvents": events}


def _event(event: dict[str, Any], shift: float, number: int, shapes: bool) -> list[dict[str, Any]]:
    kind, args = event["cat"], event["args"]
    begin = event["ts"] + shift
    common = {"External id": number, "correlation": number}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": begin - 5000.0,
            "dur": 5.0, "args": common}
    if kind == "communication":
        (kernel, collective), size = COLLECTIVES[event["name"].split()[0]], args["bytes"]
        more = {"Collective name": collective, "In msg nelems": size // 2, "Out msg nelems": size // 2,
                "Group size": args["ranks"], "dtype": "BFloat16"}
        return [call, _on_gpu(kernel, begin, event["dur"], {**common, **more, "stream": 20, "device": 0})]
    if kind not in NAMES or "variant" not in args:  # a task of kernels, which stand inside it
        return []
    op: list[dict[str, Any]] = []
    if shapes and event["name"].startswith("gemm"):
        batch, m, n, k = map(int, event["name"].split()[1].split("x"))
        sizes = [[m, k], [k, n]] if batch == 1 else [[batch, m, k], [batch, k, n]]
        op = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm" if batch == 1 else "aten::bmm", "pid": 1, "tid": 1,
               "ts": begin - 5001.0, "dur": 9.0, "args": {"External id": number, "Input Dims": sizes,
                                                          "Input type": ["c10::BFloat16", "c10::BFloat16"]}}]
    return [*op, call, _on_gpu(NAMES[kind], begin, event["dur"], {**common, "stream": 7, "device": 0})]


def _on_gpu(name: str, begin: float, length: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": args["stream"], "ts": begin, "dur": length,
            "args": args}
