"""What decides the kernels of a model: shapes, dtypes and the stack's fusions, as one hashable value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.hardware import gradient_parts
from sim.model.mixture import Experts
from sim.model.tuning import Tuned, cut_both
from sim.software import Stack
from sim.work import DTYPE_BYTES

_HALF = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: ranks of the compressed queries (0 = not compressed) and of keys and values, and the widths of
    a head: without and with rotary positions, and of its values (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Style:
    """One micro-batch of one transformer, or of a slice of it, as its layers see it.

    A slice has its share of the heads, of the inner width and of the vocabulary (`tensor` slices), of the sequence
    (`context`) and of the experts: the sizes here are the slice's own, but `hidden`, which is never cut.

    An encoder-decoder has a style per stack: `sequence` is the stack's own, `memory` what its cross attention reads.

    Attributes:
        kind: decoder, encoder, encoder-decoder or layers.
        batch, sequence: sequences and tokens per sequence of the micro-batch.
        decoder_sequence, decoder_layers: of an encoder-decoder's second stack.
        memory: tokens per sequence that keys and values come from, 0 = the stack's own.
        causal: a query sees no later keys.
        predicted: tokens per sequence that reach the vocabulary head.
        hidden, heads, kv_heads, head_dim, ffn, vocab, max_positions, layers: as in the scenario.
        experts: mixture of experts, None = dense; latent: latent attention, None = plain.
        gemm: dtype of the matrix products; act: of activations; residual: of the residual stream and norms; weight: of
            the module's weights as kernels see them; gradient: dtype the weight gradients accumulate in; widened: dtype
            a kept gradient is copied to as soon as it is complete, "" = it stays as it came.
        autocast: weights are fp32 and cast to `act` where they are used.
        window: keys each query sees, 0 = all; of a chunk of the sequence, if `chunked`.
        full_every, first_full: one block of so many behind the first so many sees all keys, and so do these.
        document: tokens of the document that a mean token stands in (`Training.attended`), 0 = a sequence is one.
        tensor, context, expert: slices the width, the sequence, the experts are cut into.
        arrives_narrow: weights are gathered in the products' narrow dtype (torchao's enable_fsdp_float8_all_gather).
        gathers: keys and values of the whole sequence are gathered before attention, else they go round a ring.
        exchanges: ranks of the context that exchange tokens for heads around attention (`head_exchange`); 1 = none.
        scattered: between the cut regions activations are cut along the sequence (Korthikanti et al. 2022).
        pipelined: products and collectives of tensor ranks are cut into pieces that overlap.
        dropout: whether dropout masks exist (their probability changes nothing else).
        qk_norm: norms of queries and keys: "head", "whole" or "" = none.
        block_norms: whether a block's halves have a norm at their input, output, or both.
        score_softcap, logit_softcap: whether scores of attention, and logits, go through a tanh.
        qkv_bias: whether the projections of queries, keys and values have biases.
        new_gelu: whether the activation is GELU's tanh form by name.
        parallel_norms: norms in front of attention and MLP where they stand side by side.
        further: blocks behind the model that each predict one token further on; copies_table: the head's stage has a
            copy of the embedding for them.
        tuned: what is trained where that is not everything.
        parted: SMs of the GPU, where each block of attention's backward adds to a sum of its own to keep an order.
        sdpa: fused kernels that scaled_dot_product_attention has here, in the order tried; sdpa_head: the widest head
            that its flash kernel takes.
        packed: how fused attention gets queries, keys and values that one product laid out head by head, and gives
            their gradients back: "in place", "copied", or "" = as any three tensors.
        fused_qkv: how Hugging Face's module lays queries, keys and values out that one product makes (parts, heads,
            groups), "" = three do; fused_gate: one makes gate and up; turned: elements of a head that it cuts out
            for rotary positions, 0 = it turns whole heads.
    """

    kind: str
    batch: int
    sequence: int
    decoder_sequence: int
    decoder_layers: int
    memory: int
    causal: bool
    predicted: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    layers: int
    gated: bool
    activation: str
    positions: str
    norm: str
    bias: bool
    tied: bool
    dropout: bool
    window: int
    parallel_block: bool
    experts: Experts | None
    latent: Latent | None
    attention: str
    chunked_loss: bool
    gemm: str
    act: str
    residual: str
    weight: str
    gradient: str
    autocast: bool
    stack: Stack
    tensor: int = 1
    context: int = 1
    expert: int = 1
    arrives_narrow: bool = False
    gathers: bool = False
    exchanges: int = 1
    scattered: bool = False
    pipelined: bool = False
    tuned: Tuned | None = None
    widened: str = ""
    full_every: int = 0
    first_full: int = 0
    chunked: bool = False
    document: float = 0.0
    qk_norm: str = ""
    block_norms: str = "input"
    score_softcap: bool = False
    logit_softcap: bool = False
    qkv_bias: bool = False
    new_gelu: bool = False
    parallel_norms: int = 1
    further: int = 0
    copies_table: bool = False
    parted: int = 0
    sdpa: tuple[str, ...] = ()
    sdpa_head: int = 0
    packed: str = ""
    fused_qkv: str = ""
    fused_gate: bool = False
    turned: int = 0

    @property
    def stream(self) -> Style:
        """The style as norms and sums of the residual stream see it: fewer tokens where they are scattered."""
        return replace(self, sequence=self.sequence // self.tensor, scattered=False) if self.scattered else self

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.batch * self.sequence

    @property
    def keys(self) -> int:
        """Keys per sequence that a query may meet."""
        return self.memory or self.sequence

    @property
    def shares_table(self) -> bool:
        """Whether the head's layer adds to the gradient of the embedding's matrix."""
        return self.tied or (self.further > 0 and not self.copies_table)

    @property
    def slices(self) -> int:
        """Parts in which a query meets its keys: one by one round a ring, or all at once."""
        return 1 if self.gathers else self.context

    @property
    def pieces(self) -> int:
        """Sequences of the micro-batch, or documents in them, that a fused kernel is launched over one by one. Round a
        ring every document is cut over the context ranks."""
        return max(self.batch, round(self.tokens * self.slices / self.document)) if self.document else self.batch

    @property
    def gradient_parts(self) -> int:
        """Tensors in which the backward of flash attention adds up the gradient of the queries."""
        return gradient_parts(self.pieces * self.heads, self.parted) if self.parted else 1

    @property
    def biased(self) -> bool:
        """Whether a tensor is added to the attention scores (relative positions)."""
        return self.positions == "relative"

    @property
    def query_width(self) -> int:
        """Width of the queries and of the attention output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_dim

    @property
    def modules(self) -> str:
        """Whose layers run: plain, transformers or megatron."""
        return self.stack.modules

    @property
    def cuts_branches(self) -> bool:
        """Whether both matrices of LoRA's branches are cut with the model."""
        return cut_both(self.tensor, self.scattered, self.modules)

    @property
    def spelled_rmsnorm(self) -> bool:
        """Whether an RMSNorm is a row of operators (LlamaRMSNorm, LitGPT's and Meta's own), not one kernel."""
        if self.norm == "layernorm" or self.modules == "megatron" or self.stack.fused_rmsnorm:
            return False
        return self.modules == "transformers" or not (self.stack.rmsnorm_kernel or self.stack.compile)

    @property
    def wide_norm(self) -> bool:
        """Whether an RMSNorm that is spelled out multiplies by its weight in fp32."""
        return self.norm == "rmsnorm-fp32"

    @property
    def norms_input(self) -> bool:
        """Whether attention and MLP read what a norm made of the residual stream."""
        return self.block_norms != "output"

    @property
    def norms_output(self) -> bool:
        """Whether a norm stands between attention or MLP and the sum."""
        return self.block_norms != "input"

    @property
    def widens_logits(self) -> bool:
        """Whether logits are cast to fp32 before the loss: what the stack says, and of Hugging Face's decoders each."""
        if self.modules != "transformers":
            return self.stack.loss_upcast or (self.tuned is not None and self.stack.tuning_upcast)
        llama = self.positions == "rotary" and self.joint_qkv in ("", "parts")
        return self.stack.loss_upcast or (self.kind == "decoder" and self.stack.widens_logits(llama))

    @property
    def keeps_chunks(self) -> bool:
        """Whether a loss in chunks keeps their logits for backward (torchtune's), not their gradients (Liger's)."""
        return self.stack.chunked_logits_kept and self.modules != "transformers"

    @property
    def main_grad(self) -> bool:
        """Whether weight gradients are added to those in a buffer, wider ones as a rule (Megatron's `main_grad`)."""
        return not self.autocast and (self.gradient != self.act or (self.stack.adds_halves and self.act in _HALF))

    @property
    def constant_input(self) -> bool:
        """Whether backward ends in the first block, everything in front of it being frozen. A decoder's input gets a
        gradient, as peft's `enable_input_require_grads` asks for it, and so does every block where none is trained."""
        tuned = self.tuned
        behind_norm = tuned is not None and tuned.trains_norms and self.kind == "encoder"  # which the lookups are in
        return (tuned is not None and self.kind != "decoder" and not behind_norm
                and any(target != "head" for target in tuned.targets))

    @property
    def merges_gate(self) -> bool:
        """Whether gate and up are one product of one matrix."""
        stacked = self.modules == "transformers" and self.experts is not None and not self.takes_turns
        joint = self.fused_gate and self.modules == "transformers" and self.experts is None and self.tuned is None
        return self.modules == "megatron" or stacked or joint or (
            self.stack.merged_gate and self.modules == "plain" and self.tuned is None and self.experts is None)

    @property
    def takes_turns(self) -> bool:
        """Whether experts run one by one, each a module of its own: Hugging Face's before transformers 5, and LoRA's
        targets there."""
        return self.modules == "transformers" and (self.stack.experts_in_turns or self.tuned is not None)

    @property
    def broadcasts_keys(self) -> bool:
        """Whether attention gets one head of keys for all queries and no word of groups: Falcon's `multi_query`."""
        return self.joint_qkv == "groups" and self.kv_heads == 1 < self.heads and self.attention == "sdpa"

    @property
    def joint_qkv(self) -> str:
        """How one product of Hugging Face's module lays queries, keys and values out, "" where three make them; beside
        frozen weights they are taken for three."""
        return self.fused_qkv if self.separate_qkv and self.kind == "decoder" and self.tuned is None else ""

    @property
    def cut_heads(self) -> bool:
        """Whether what rotary positions turn of a head is cut out and joined again; fine-tuned whole heads, too."""
        part = self.turned > 0 and self.modules == "transformers"
        joined = self.stack.joins_heads and self.modules == "plain" and self.tuned is not None
        return (part or joined) and not (self.stack.fused_rope or self.stack.compile)

    @property
    def copies(self) -> str:
        """What tensor ranks copy of activations cut along the sequence (`Stack.copied_along`)."""
        return self.stack.copied_along(self.batch) if self.scattered and not self.pipelined else "none"

    @property
    def compiles_casts(self) -> bool:
        """Whether torch.compile writes the casts of torchao's dynamic scaling by tensor (`compiled_casts`): in dense
        blocks of decoders, trained whole. TransformerEngine's modules are calls of their own to it."""
        stack = self.stack
        dynamic = stack.compile and stack.narrow_amax_pass and stack.narrow_keeps_inputs and self.gemm == "fp8"
        dense = self.kind == "decoder" and self.experts is None and self.latent is None and self.tuned is None
        return dynamic and dense and self.modules != "megatron" and DTYPE_BYTES[self.act] > 1

    @property
    def adds_biases(self) -> bool:
        """Whether a kernel of its own adds a linear layer's bias to what the product made (`Stack.linear_bias`)."""
        return self.stack.linear_bias == "added" and self.modules != "megatron"

    @property
    def turns_complex(self) -> bool:
        """Whether rotary positions multiply complex numbers (`Stack.complex_rope`). Where queries and keys have norms
        of their own, cos and sin are taken."""
        return self.stack.complex_rope and self.modules == "plain" and self.kind == "decoder" and not self.qk_norm

    @property
    def copies_heads(self) -> bool:
        """Whether queries, keys and values are copied on their way from their projection (`Stack.copied_heads`)."""
        return self.stack.copied_heads and self.modules == "plain" and self.kind == "decoder" and not self.stack.compile

    @property
    def copies_queries(self) -> bool:
        """Whether queries of grouped heads are copied out of the product of all three: Megatron's lie group by group
        beside their keys and values, and become heads by a reshape. A norm of heads copies them itself.

        Source: megatron-core 0.3.0 to 0.15.0 transformer/attention.py, SelfAttention.get_query_key_value_tensors
        (query.reshape; traced on fake tensors: 0.12.0).
        """
        own = self.heads != self.kv_heads and self.latent is None
        return self.modules == "megatron" and own and not (self.qk_norm or self.memory)

    @property
    def copies_values(self) -> bool:
        """Whether values, and keys that no positions turn, are copied for attention (`Stack.copied_values`)."""
        parted = self.positions == "rotary" or self.heads != self.kv_heads
        own = self.modules == "megatron" and self.latent is None and not self.memory
        return self.stack.copied_values and own and parted and self.attention == "flash"

    @property
    def packs_heads(self) -> bool:
        """Whether queries, keys and values stay as one product laid them out up to attention (`packed`)."""
        alone = self.heads == self.kv_heads and self.positions != "rotary" and self.context == 1
        return bool(self.packed) and alone and not (self.qk_norm or self.memory or self.latent)

    @property
    def one_forward(self) -> bool:
        """Whether a block is one function, attention included, whose variables (queries, keys and values in one tensor,
        what attention made of them) last to its end: plain GPT blocks, whose norms' outputs no variable holds. What
        autograd keeps is the same; a checkpointed block's forward is higher."""
        return (self.stack.blocks_in_one and self.modules == "plain" and self.kind == "decoder"
                and self.positions == "learned" and self.tuned is None and self.block_norms == "input"
                and not (self.separate_qkv or self.stack.compile))

    @property
    def weight_placeholder(self) -> bool:
        """Whether the blocks' products add into `main_grad` and autograd gets a tensor that is always there."""
        stack = self.stack
        return (self.main_grad and stack.gradient_accumulation_fusion and stack.weight_placeholders
                and self.kind == "decoder")

    @property
    def checkpoint_parts(self) -> int:
        """Tensor ranks that share the input a recomputed block keeps."""
        return self.tensor if self.stack.partition_checkpoints and not self.scattered else 1

    @property
    def wide(self) -> str:
        """Dtype of the products that narrow formats leave alone: attention's, the head's, a router's. TF32 is a flag of
        all products of fp32 tensors, batched ones too (torch.backends.cuda.matmul.allow_tf32)."""
        return self.act if DTYPE_BYTES[self.gemm] < DTYPE_BYTES[self.act] else self.gemm

    @property
    def conv1d(self) -> bool:
        """Hugging Face's GPT-2 code: fused `c_attn`, weights stored (in, out), gelu_new spelled out in operators. OPT
        (relu) and GPT-BigCode (heads share keys) have linear layers (modeling_opt.py, modeling_gpt_bigcode.py)."""
        gpt2 = self.kind == "decoder" and self.positions == "learned" and not self.gated
        own = self.activation == "gelu" and self.kv_heads == self.heads and not self.fused_qkv
        return self.modules == "transformers" and gpt2 and own

    @property
    def spells_gelu(self) -> bool:
        """Whether GELU's tanh form runs operator by operator: Hugging Face's GPT-2, gated T5, and what names it
        (NewGELUActivation: Phi, GPT-J)."""
        t5 = self.kind == "encoder-decoder" and self.gated and self.modules == "transformers"
        named = self.new_gelu and self.modules == "transformers"
        return (self.conv1d or t5 or named) and self.activation == "gelu" and not self.stack.fused_bias_gelu

    @property
    def mixes(self) -> bool:
        """Whether matrices are trained in another dtype than the frozen ones run in, and no autocast casts either."""
        return self.tuned is not None and not self.autocast and self.tuned.dtype != self.act

    @property
    def branch(self) -> Style:
        """The style as what is trained beside frozen layers sees it."""
        if self.tuned is None or not self.mixes:
            return self
        return replace(self, act=self.tuned.dtype, gemm=self.tuned.gemm, gradient=self.tuned.dtype)

    @property
    def widens_powers(self) -> bool:
        """Whether autocast takes powers in fp32; where the stack makes the whole module half, nothing does."""
        return self.autocast and not self.stack.residual_dtype_follows_autocast

    @property
    def separate_qkv(self) -> bool:
        """Three projections instead of one (Hugging Face's code but GPT-2's)."""
        return self.modules == "transformers" and not self.conv1d

    @property
    def projects_apart(self) -> bool:
        """Queries, keys and values come of three matrices, in whoever's code (`Stack.separate_qkv`)."""
        return self.separate_qkv or (self.stack.separate_qkv and self.modules == "plain" and self.kind == "decoder")


@dataclass(frozen=True, slots=True)
class Program:
    """Which layer of which style: everything that decides its memory.

    Attributes:
        layer: "embedding", "block", "bridge" or "head"; "first block" where it makes what the other blocks read,
            "last block" where the gradients of that begin.
        style: of a decoder that reads an encoder's output, with `memory` set.
    """

    layer: str
    style: Style
