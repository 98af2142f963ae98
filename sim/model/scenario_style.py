"""The style of a scenario: the only place of this room that reads one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.hardware import gpu, parted_sms
from sim.model.mixture import experts_of
from sim.model.style import Latent, Style
from sim.model.tuning import tuned_of
from sim.scenario.fields.schema import TWO_CHUNKS
from sim.scenario.named.gpus import gpu_facts
from sim.software import Stack, sdpa_kernels
from sim.work import DTYPE_BYTES

_HALF = ("fp16", "bf16")
#: Compute dtypes below 16 bits run their matrix products in them and everything else in bf16 (TransformerEngine).
_NARROW = ("fp8", "mxfp8", "nvfp4", "int8", "int4")
#: What activations are called here; nothing said is GELU.
_GELU = {None: "gelu", "gelu-new": "gelu"}
#: Strategies that gather parameters before they are used; the others have no wire on which to narrow them.
_GATHERING = ("fsdp", "zero2", "zero3")
#: Compute capabilities whose shared memory is too small for the flash kernel's backward of the widest heads.
_SMALL = ("8.6", "8.9", "12.0")
#: Compute capability (its first number) from which on TransformerEngine takes cuDNN's attention.
_CUDNN = 9


def style_of(scenario: Any, stack: Stack, batch: int) -> Style:
    """The style of a scenario's model (the encoder's, of an encoder-decoder; a table of layers has sizes of 0)."""
    model, training, precision = scenario.model, scenario.training, scenario.training.precision
    if stack.reentrant:
        whole = scenario.parallel.strategy != "fsdp"
        stack = replace(stack, reentrant=whole, early_stop=stack.early_stop and not whole)
    stack = fitting(stack, model)
    fused, widest = _sdpa(scenario, stack)
    if fused:
        stack = replace(stack, unpadding="none")  # which is of flash-attn's wrapper
    gemm = training.matrix_dtype
    act = "bf16" if gemm in _NARROW else "fp32" if gemm == "tf32" else gemm
    half = precision.compute in (*_HALF, *_NARROW)
    cast_on_the_wire = precision.gather in _HALF and scenario.parallel.strategy in _GATHERING
    narrow = precision.gather in _NARROW and scenario.parallel.strategy in ("fsdp", "zero3")
    autocast = half and precision.parameters not in _HALF and not cast_on_the_wire and not narrow
    follows = stack.residual_dtype_follows_autocast or stack.low_precision_norm
    hidden, heads = model.hidden, model.heads
    tensor, context = scenario.parallel.tensor, scenario.parallel.context
    predicting = training.decoder_sequence if model.kind == "encoder-decoder" else training.sequence
    tied = bool(model.tied_embeddings)
    tuned = tuned_of(training, stack.modules == "plain" and not tied and not training.chunked_loss,
                     stack.modules == "megatron", stack.modules == "transformers" and model.kind == "encoder-decoder",
                     stack.adapter_dropout, str(precision.gather) if cast_on_the_wire else "")
    weight = tuned.plain if tuned and autocast else "fp32" if autocast else act
    gradient = _gradient(precision, act, autocast)
    whole = stack.gradient_path == "reducer" and scenario.parallel.strategy not in _GATHERING
    return Style(
        kind=model.kind, batch=batch, sequence=training.sequence // context,
        decoder_sequence=(training.decoder_sequence or training.sequence) // context,
        decoder_layers=model.decoder_layers or 0,
        memory=0, causal=model.kind == "decoder", predicted=(training.predicted_tokens or predicting) // context,
        hidden=hidden, heads=max(1, heads // tensor), kv_heads=max(1, (model.kv_heads or heads) // tensor),
        head_dim=model.head_dim or hidden // max(1, heads), ffn=(model.ffn or 4 * hidden) // tensor,
        vocab=_vocabulary(model.vocab, tensor, stack.vocabulary_multiple),
        max_positions=model.max_positions or training.sequence,
        layers=model.layers, gated=bool(model.gated_mlp), activation=_GELU.get(model.activation, model.activation),
        positions=model.positions, norm=model.norm, bias=bool(model.bias), tied=tied,
        dropout=bool(model.dropout), window=_window(model.window, training.sequence),
        parallel_block=bool(model.parallel_block), experts=experts_of(scenario, model.ffn or 4 * hidden),
        latent=_latent(model.mla), attention=training.attention, chunked_loss=bool(training.chunked_loss),
        gemm=gemm, act=act,
        # behind an encoder's norms, which autocast runs in fp32 whatever their weights are
        residual="fp32" if autocast and not follows and (weight == "fp32" or model.kind == "encoder") else act,
        weight=weight, gradient=gradient, autocast=autocast,
        stack=stack, tensor=tensor, context=context, expert=scenario.parallel.expert, arrives_narrow=narrow,
        gathers=scenario.parallel.context_exchange == "all-gather" and context > 1, exchanges=scenario.head_ranks,
        scattered=scenario.parallel.sequence_parallel and tensor > 1, pipelined=scenario.parallel.async_tensor,
        tuned=tuned,
        full_every=model.full_every or 0, first_full=model.first_full, chunked=bool(model.chunked_window),
        document=training.attended if training.packed else 0.0,
        qk_norm=model.qk_norm or "", block_norms=model.block_norms,
        score_softcap=bool(model.score_softcap), logit_softcap=bool(model.logit_softcap),
        qkv_bias=bool(model.qkv_bias) or bool(model.bias), new_gelu=model.activation == "gelu-new",
        parallel_norms=model.parallel_norms, sdpa=fused, sdpa_head=widest,
        packed=_packed(scenario, stack), fused_qkv=model.fused_qkv or "", fused_gate=model.fused_gate,
        turned=round((model.rotary_share or 0.0) * (model.head_dim or hidden // max(1, heads))),
        further=model.mtp_layers if training.mode == "train" else 0,
        copies_table=bool(model.mtp_layers) and _apart(scenario.parallel),
        parted=_parted(scenario, stack),
        widened=gradient if whole and tuned is None and DTYPE_BYTES[gradient] > DTYPE_BYTES[weight] else "",
    )


def fitting(stack: Stack, model: Any) -> Stack:
    """The stack without fused kernels that decoders with RMSNorm alone have, for any other model."""
    if stack.fused_models == "every" or (model.kind == "decoder" and model.norm != "layernorm"):
        return stack
    return replace(stack, fused_rmsnorm=False, fused_rope=False, fused_swiglu=False, fused_in_place=False,
                   norm_kernel="two_pass")


def _sdpa(scenario: Any, stack: Stack) -> tuple[tuple[str, ...], int]:
    """Kernels of `scaled_dot_product_attention` on the cluster's GPU where that is asked for, and the widest head of
    its flash kernel."""
    training = scenario.training
    if training.attention != "sdpa":
        return (), 0
    capability = str(gpu_facts(scenario.cluster.topology.gpu)["compute_capability"])
    small = capability in _SMALL and training.mode == "train"
    return sdpa_kernels(stack, capability), stack.sdpa_head_small if small else stack.sdpa_head


def _packed(scenario: Any, stack: Stack) -> str:
    """How fused attention on the cluster's GPU gets what one product laid out (`Style.packed`)."""
    if not stack.heads_in_place or scenario.training.attention != "flash":
        return ""
    capability = str(gpu_facts(scenario.cluster.topology.gpu)["compute_capability"]).partition(".")[0]
    return "in place" if capability.isdigit() and int(capability) >= _CUDNN else "copied"


def _parted(scenario: Any, stack: Stack) -> int:
    """SMs of the GPU where flash attention's backward keeps an order by a sum for each of its blocks, else 0."""
    kernel = stack.sdpa_flash if scenario.training.attention == "sdpa" else stack.attention_kernel
    return parted_sms(gpu(scenario.cluster.topology.gpu), kernel) if stack.fixed_order else 0


def _apart(parallel: Any) -> bool:
    """Whether embedding and head are on different ranks."""
    return bool(parallel.pipeline > 1 and parallel.schedule not in TWO_CHUNKS)


def _vocabulary(vocab: int, tensor: int, multiple: int) -> int:
    """Rows of the vocabulary a slice holds, padded so that all slices are equal multiples."""
    unit = multiple * tensor
    return -(-vocab // unit) * multiple


def _gradient(precision: Any, act: str, autocast: bool) -> str:
    """Dtype the weight gradient of one micro-step ends in: fp32 `main_grad` beside half weights, else the weights'."""
    if autocast:
        return "fp32"
    main_grad = precision.parameters in _HALF and DTYPE_BYTES[precision.gradients] > DTYPE_BYTES[act]
    return str(precision.gradients) if main_grad else act


def _window(window: int | None, sequence: int) -> int:
    return window if window and window < sequence else 0


def _latent(mla: Any) -> Latent | None:
    if mla is None:
        return None
    return Latent(mla.q_rank, mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.value_dim)
