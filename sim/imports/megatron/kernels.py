"""Which kernels Megatron-LM's arguments choose: attention, fusions, graphs, experts.

Names and defaults: megatron-core 0.16.1 transformer/transformer_config.py; Megatron-LM's arguments.py (recalled, as are
Megatron-DeepSpeed's additions).
"""

from __future__ import annotations

from pathlib import Path

from sim.catalog import table
from sim.errors import UserError
from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args
from sim.imports.megatron.environment import read_environment, unfused
from sim.imports.megatron.model import choice
from sim.imports.settings import Said
from sim.scenario.named.gpus import gpu_facts
from sim.scenario.named.topologies import find_topology
from sim.software import stack_for

#: --attention-backend -> training.attention.
_BACKENDS = {"flash": "flash", "fused": "flash", "unfused": "eager", "local": "eager", "auto": None}
#: Switches of flash attention; those with a suffix are Megatron-DeepSpeed's.
_FLASH = ("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
#: Arguments that releases with TransformerEngine (from 2023 on) no longer have.
_OLD = ("checkpoint_activations", "checkpoint_num_layers", "activations_checkpoint_method",
        "activations_checkpoint_num_layers", "DDP_impl", "model_parallel_size", "batch_size",
        "scaled_upper_triang_masked_softmax_fusion")
_YEARS = range(2016, 2101)
_ENGINE_SINCE = 2024
_GRAPHS = {"none": False, "local": True, "transformer_engine": True, "full_iteration": True}
#: Scopes of graphs that hold whole layers.
_WHOLE = {"full", "full_iteration"}
#: Switches of fused kernels: all off are `software.fused: false`.
_FUSIONS = {"masked_softmax_fusion": "no_masked_softmax_fusion", "bias_gelu_fusion": "no_bias_gelu_fusion",
            "bias_swiglu_fusion": "no_bias_swiglu_fusion", "bias_dropout_fusion": "no_bias_dropout_fusion"}


def read_kernels(args: Args, draft: Draft, half: bool) -> None:
    """Attention, fusions, graphs and experts' kernels; `half` is whether products are narrower than fp32."""
    _attention(args, draft, half)
    _fusions(args, draft)
    impl = args.get("cuda_graph_impl")
    graphs, scope = args.on("enable_cuda_graph", "external_cuda_graph"), args.get("cuda_graph_scope")
    asked = impl if impl is not None and choice(impl, _GRAPHS) else graphs
    if asked is not None:
        draft.take("software.cuda_graphs", True, asked)
        if scope is not None:
            _scope(scope, draft)
    if (deterministic := args.on("deterministic_mode")) is not None:
        draft.take("software.deterministic", True, deterministic)
    read_environment(args, draft)
    _mixture(args, draft)


def _scope(scope: Said, draft: Draft) -> None:
    """What of a layer is in graphs (transformer_config.py, cuda_graph_scope: full or an empty list is all of it)."""
    said = scope.value if isinstance(scope.value, list) else str(scope.value).replace(",", " ").split()
    if not {str(part).rpartition(".")[2] for part in said} <= _WHOLE:
        draft.leave(scope, "parts of layers in graphs are not simulated: the host is counted as launching nothing, "
                           "which is too fast where it is behind (software.cuda_graphs: false has it launch all)")


def _attention(args: Args, draft: Draft, half: bool) -> None:
    path = "training.attention"
    flash, backend, layers = args.on(*_FLASH), args.get("attention_backend"), args.get("transformer_impl")
    old, bare = next((said for name in _OLD if (said := args.get(name)) is not None), None), unfused(args)
    if backend is not None and (attention := choice(_bare(backend), _BACKENDS)) is not None:
        draft.take(path, attention, backend)
    elif flash is not None:
        draft.take(path, "flash", flash)
    elif bare is not None:
        draft.take(path, "eager", bare, "neither of TransformerEngine's fused kernels")
    elif layers is not None and layers.word() == "local":
        draft.take(path, "eager", layers, "core/transformer/dot_product_attention.py")
    elif args.on("deepspeed"):
        draft.assume(path, "eager", "Megatron-DeepSpeed without --use-flash-attn-v2 or another of its switches")
    elif old is not None:
        draft.assume(path, "eager", f"{old.name} is of releases before TransformerEngine, and --use-flash-attn is off")
    elif layers is None and draft.before(_ENGINE_SINCE):
        draft.assume(path, "eager", "--transformer-impl was local before 2024, and --use-flash-attn is off (recalled)")
    elif not half:
        draft.assume(path, "eager", "no fused kernel of TransformerEngine takes fp32")
    elif _lacks_bf16(draft):
        draft.assume(path, "eager", "flash attention needs a GPU with bf16")
    else:
        draft.assume(path, "flash", "TransformerEngine chooses a fused kernel (--attention-backend auto)")


def _lacks_bf16(draft: Draft) -> bool:
    """Whether the command line names a cluster whose GPU is too old for flash attention."""
    named = draft.given("cluster.topology")
    try:
        gpu = find_topology(named, Path()).data.get("gpu") if isinstance(named, str) else None
        return gpu is not None and "bf16" not in gpu_facts(gpu)["tflops"]
    except UserError:
        return False  # the scenario's own reading says what is wrong with it


def _bare(said: Said) -> Said:
    """A setting whose value has the name of its enumeration in front, without it (`AttnBackend.flash`)."""
    return Said(said.file, said.name, str(said.value).rpartition(".")[2], said.line)


def _fusions(args: Args, draft: Draft) -> None:
    if (apart := args.off("gradient_accumulation_fusion", "no_gradient_accumulation_fusion")) is not None:
        draft.take("software.fused_accumulation", False, apart)
    off = [said for name, stop in _FUSIONS.items() if (said := args.off(name, stop)) is not None]
    gated = draft.value("model.gated_mlp")
    wanted = len(_FUSIONS) - 1  # of the two activations' a model has one
    seen = [said for said in off if ("swiglu" if not gated else "gelu") not in said.name]
    if len(seen) >= wanted:
        draft.take("software.fused", False, seen[0])
        return
    for said in off:
        # masked_softmax is a kernel of eager attention alone
        idle = "softmax" in said.name and draft.value("training.attention") != "eager"
        if said in seen and said.name.startswith("--") and not idle:
            draft.leave(said, "software.fused: false switches all fusions off")


def _mixture(args: Args, draft: Draft) -> None:
    """What the arguments say of experts' kernels, beside what the stack has of itself."""
    number = args.get("num_experts", "num_moe_experts")
    grouped, permuted = args.on("moe_grouped_gemm"), args.on("moe_permute_fusion")
    deep = args.on("moe_enable_deepep")
    backend, kind = args.get("moe_flex_dispatcher_backend"), args.get("moe_token_dispatcher_type")
    if number is None or draft.value("model.moe.experts") is None:
        return
    flex = (backend or kind) if kind is not None and kind.word() == "flex" else None
    once = deep if deep is not None else flex
    when = draft.given("software.year")
    known = isinstance(when, int) and when in _YEARS
    stack = stack_for(draft.value("software.framework"), when if known else table("scenario/defaults.yaml")["year"],
                      fused=draft.value("software.fused") is not False)
    if grouped is None:
        _tell(draft, number, "--moe-grouped-gemm", False, "experts that run one after the other are not simulated: "
                                                          "products of all experts are counted together")
    if stack.fused_permutation != (permuted is not None):
        _tell(draft, permuted or number, "--moe-permute-fusion", permuted is not None,
              "whether tokens are sorted by one kernel follows software.year")
    if draft.value("parallel.expert") is not None:
        if once is not None:
            draft.take("software.dispatcher", "flex", once)
        elif kind is not None and kind.word() == "alltoall":
            draft.take("software.dispatcher", "alltoall", kind)
        else:
            draft.assume("software.dispatcher", "alltoall", "all-gathers, moe_token_dispatcher_type's default, are not "
                                                            "simulated")


def _tell(draft: Draft, said: Said, name: str, value: bool, why: str) -> None:
    """Leaves a switch, also one that nobody wrote."""
    draft.leave(said if value else Said(said.file, name, value, said.line), why)
