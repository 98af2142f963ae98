"""A training stack as named facts: what it launches, fuses, keeps and synchronises, and what its host code costs.

Nowhere else does code ask for a framework's name or a year: every difference between stacks is a field of `Stack`,
read from `profiles/*.yaml` (value, unit, source and confidence of each).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.software.deepspeed import DeepSpeed
from sim.software.hugging_face import HuggingFace
from sim.software.megatron import Megatron


@dataclass(frozen=True, slots=True)
class Stack(HuggingFace, DeepSpeed, Megatron):
    """What a training stack does. Units and sources of each fact: `profiles/*.yaml`, or `facts_of`.

    Attributes:
        framework: profile name.
        modules: whose layers run: plain, transformers or megatron.
        compile: whether Inductor fuses element-wise chains.
        host_forward_s, host_backward_s: host time per operator (one `Kernel.launches`) in forward, and by autograd.
        host_module_s: host time of the Python around an operator (module calls, views, arguments) where the model's
            code runs, in forward, recomputation and once per generated token: small steps show it.
        host_collective_s: host time per collective call.
        host_view_s: host time per view of a tensor (narrow, chunk), which launches nothing.
        host_step_s: fixed host time per optimizer step.
        host_spread_s: mean of what comes and goes on top of it on each node, where all hosts meet once per step.
        host_batch_s: host time of fetching a micro-batch in front of every forward, which waits for the GPU; 0 where
            the loop hides it.
        host_exchange_s: host time between the end of a synchronised exchange of stages and the next launch.
        launch_queue: launches the host may be ahead of the GPU.
        rank_jitter_s: standard deviation of a rank's arrival at a collective.
        product_rate: tensor-core products of this stack's libraries over those of the calibrated kernel tables.
        step_sync: whether the host waits for the GPU at the end of every step.
        half_policy: whose 16-bit training is its own: megatron or mixed (names of `training.precision` without their
            -bf16 or -fp16); autocast otherwise.
        clip_gradients: whether the gradient norm is computed and applied every step.
        loss: "plain" (log-softmax and nll), "fused", "fused_in_place" (TransformerEngine: the gradient is written over
            the logits) or "vocab_parallel" (Megatron's own, a chain of kernels).
        cuda_kernels: operators run as on a GPU: kernels ask the allocator for room of their own, and SiLU's backward is
            one of them. On fake tensors none asks, and that one is composed of operators.
        blocks_in_one: forward of a plain GPT block is one function, attention included.
        compiled_end: of what stands behind the blocks, torch.compile covers: none, chunks (a loss's), loss, or all.
        pads_products: products whose sizes are no multiple of 16 bytes are padded (`sim.model.padded`).
        loss_overwrites: a vocab_parallel loss works in place on the fp32 logits; else its first step is a copy beside
            them, and the model has let go of the narrow ones by then.
        chunked_logits_kept: a loss in chunks keeps the logits of all of them, in the model's dtype; else it makes the
            gradients in forward.
        chunks_cut: what a loss in chunks takes of a vocabulary that tensor ranks share: its own slice ("slice"), or
            logits of all slices, which every rank gathers ("whole").
        loss_upcast: logits are cast to fp32 in front of an unfused loss.
        tuning_upcast: fine-tuning casts logits to fp32 in front of it.
        tuning_chunk: fine-tuning makes logits and loss of so many positions at a time and keeps them all; 0 = at once.
        metric_losses: extra forward evaluations of the loss on the training logits per micro-batch.
        outputs_kept: the trainer holds a micro-batch's logits until the next one's are there.
        stage_tensors_kept: a stage has transfer buffers for every micro-batch and keeps its outputs (see
            `sim.parallel.pipeline.standing`).
        stage_outputs: micro-batches whose logits, in fp32, the last stage holds on to, a single stage too.
        early_stop: recomputation stops at a block's last saved tensor.
        reentrant: checkpoints are torch's reentrant ones, without early stop, unless FSDP wraps the model.
        attention_kernel: implementation behind `attention: flash`: flash1, flash2, flash3, triton or trtllm (engines of
            inference call it).
        fixed_order: its backward adds the queries' gradient up in a fixed order.
        names_algorithm: a deterministic run has to name NCCL's algorithm.
        fills: new tensors that are filled before a kernel writes them: none, own (ATen's, of operators that are not
            structured) or outputs (those and what TransformerEngine's products make).
        sdpa_kernels: fused kernels of scaled_dot_product_attention in the order tried, each with the compute
            capabilities that have it, or none; sdpa_flash: its flash kernel's implementation.
        sdpa_head, sdpa_head_small: widest head of its flash kernel; on cards of 8.6 and 8.9 where a gradient is asked.
        sdpa_masks: its memory-efficient kernel takes masks, biases and dropout.
        sdpa_groups: Hugging Face's modules leave grouped heads to it where they can; else they copy keys and values.
        sdpa_math_widens: without a fused kernel it computes halves in fp32.
        sdpa_mask_each: every call makes its mask of numbers from the model's booleans; else the model made one.
        sdpa_mask_always: Falcon's modules give it a mask where plain causality would do.
        residual_dtype_follows_autocast: the residual stream is half, not fp32, under autocast.
        low_precision_norm: norms run in half under autocast.
        unpadding: how the attention wrapper copies qkv and output between padded and packed form: none, packed (qkv at
            once), apart (queries, keys and values one after another) or known (apart, by rows found once per forward).
        shards_copied: FSDP 1 copies a unit's shard before it gathers it, though it has the right dtype.
        records_streams: what a collective used that one waits for comes back behind an event of NCCL's stream.
        views_beside: FSDP 1 makes its views, so their backward the flat gradient, on the stream of its all-gathers.
        whole_first_bucket: DDP has all gradients in one bucket until the first step is over.
        reduction_copied: FSDP 1 copies a unit's gradient once more before it reduces it.
        step_reductions: all-reduces of a few numbers at the end of a step, whose results the host reads one by one.
        metric_gathers: states of training metrics that are gathered over all ranks at the end of every step.
        host_read_s: from the end of what the GPU has to do to the host going on with a number it reads there.
        fused_*: one kernel instead of a chain (bias + GELU, SwiGLU, rotary, RMSNorm, scale + mask + softmax,
            bias + dropout + residual).
        complex_rope: plain decoders turn queries and keys as complex numbers in fp32.
        fused_latent_rope: latent attention's queries are turned in place, and its keys and values written whole, by a
            kernel each.
        fused_models: whose modules have those kernels of norms, rotary positions and MLPs: every model's, or rmsnorm
            (decoders with RMSNorm alone).
        fused_in_place: they write over what they read: rotary positions over queries and keys, gradients of gate and up
            over what was kept of these, a norm's gradient over its output's.
        norm_kernel: two_pass (backward reads its inputs again for the weight gradients), persistent (a row is read once
            each way), listed (so, where the width is one that apex's kernel was built for), or per_sm (so, backward by
            one program on each SM, which goes through its rows one by one).
        norm_quantises: what a norm in front of a product in fp8 does of its input's cast: none, output (it writes the
            8-bit copy alone) or maximum (it finds the scale).
        rmsnorm_kernel: torch.nn.RMSNorm is one kernel, which plain modules then use.
        merged_gate: plain modules make gate and up by one product of one matrix, and split what comes out.
        separate_qkv: plain decoders have three matrices for queries, keys and values; else one.
        linear_bias: biases of linear layers are the product's own, or "added" to what it made.
        projection_bias: what adds the bias of queries, keys and values that one product makes: the product, whose
            gradient is a sum over all rows ("forward"), the products both ways ("both"), or a kernel each ("apart").
        joins_heads: plain modules of fine-tuning join what was turned of a head to its rest, even to nothing, by a cat.
        expands_kv: plain modules copy grouped keys and values out to every query head in front of fused attention.
        copied_heads: queries, keys and values are copied from (sequence, batch) to (batch, sequence) in front of rotary
            positions, keys and values side by side and interleaved, too.
        copied_values: keys and values are copied out of the product of all three where attention does not take them as
            they lie: values beside keys that positions have turned, both of grouped heads.
        heads_in_place: attention reads queries, keys and values as one product laid them out, head by head, and writes
            their gradients so, where cuDNN's kernel runs (compute capability 9.0 and later); flash-attn's gets copies.
        fused_permutation: tokens are copied to their experts and added up again by one kernel each, and the experts'
            scores weigh the activation instead of the output.
        router_launches, router_backward_launches: kernels on the scores of all experts, and on what is counted of the
            choice, in eager code; few bytes each.
        pads_rows: rows of experts whose products are narrow are copied to as many as such products take, and back.
        experts_in_turns: Hugging Face's modules run expert by expert, each a module of its own; else all at once.
        experts_looped: each expert's products are launched by themselves; else one grouped kernel is.
        dispatch_once: a token travels once to every node (in one: GPU) with experts of its, and is copied there.
        dispatch_kernel: whose kernels do so: deepep, hybridep.
        dispatch_read: what is over when the host reads how many rows go where: none (it does not), all in front of the
            dispatch (behind), or the counts (beside the permutation).
        experts_scattered: mixtures train over tensor ranks only where these cut the sequence.
        expert_overlap: what hides tokens on their way to experts where the layout allows it: none, shared (experts),
            batches (a forward and a backward of two micro-batches run as one).
        expert_overlap_blocks: the same where products are scaled in blocks: mxfp8, asked for or as what fp8 means on a
            GPU that multiplies such.
        gradient_accumulation_fusion: the weight-gradient GEMM adds into the gradient buffer itself.
        half_accumulation_fusion: so it does where the buffer is no wider than the weights, too.
        weight_placeholders: what autograd gets instead of such a gradient is kept from step to step, one tensor for
            each shape of weight in the blocks; else it is made anew each time.
        adapter_dropout: adapters of fine-tuning drop out their input.
        quantised_keeps_input: a 4-bit linear layer keeps its input for backward, which it does not need.
        quantised_through_half: a 4-bit weight is read as fp16 and then cast to the activations' dtype.
        constants_apart: constants of a quantised weight are no part of the parameter: what splits parameters or moves
            them off the GPU leaves every rank all of them.
        logits_held: the training loop holds a micro-batch's logits until the next one's are there.
        graph_kept: the training loop still holds the last micro-batch's logits, and with them the graph, until the next
            forward returns; what nodes hold that is no saved tensor (the inputs of 4-bit layers) lives as long.
        frozen_apart: in FSDP 1 what is not trained has flat parameters of its own; else gradients, in others.
        original_parameters: the optimizer of FSDP 1 sees the parts of the model's own parameters in a rank's shards.
        optimizer_reads: numbers that the host reads on the GPU in the update of every tensor.
        sums_in_master: PyTorch's half gradients beside fp32 master parameters are added to fp32 gradients of those
            behind every backward; else to one another.
        unscaling: where gradients of a scaled fp16 loss are divided and looked through: in a pass of their own (apart),
            with their copy in fp32, if any (copied), or with the scaling by the clip coefficient, if any (clipped).
        optimizer_kernel: loop, foreach or fused, where the scenario does not say.
        pinned_powers: PyTorch rounds pinned host memory up to powers of two.
        fused_counters: a fused Adam counts the steps of every tensor in a tensor of its own on the GPU.
        muon: whose code orthogonalises matrices (`sim.model.update.muon`): none, torch, emerging (Megatron's, of fp32
            matrices) or owned (torchtitan's, whose ranks exchange shards for whole matrices).
        muon_nesterov: its momentum is Nesterov's unless told otherwise.
        muon_splits_qkv: it takes queries, keys and values of one matrix apart unless told otherwise.
        gradient_path: how data parallelism reduces gradients and splits states: reducer (PyTorch's DDP and FSDP), ipg
            (DeepSpeed's independent-parameter-gradient buckets), grad_buffer (one buffer, reduced in place) or
            accumulator (one fp32 buffer that whole half gradients are added to behind each backward).
        parameter_storage: apart (each parameter a tensor), flattened (one flat tensor) or remapped (views of one
            buffer, with the distributed optimizer).
        cpu_optimizer: an optimizer on the CPU: fused (one vectorised pass) or loop (a pass over memory per operator).
        cpu_fuses: it is fused there too where the scenario asks for fused kernels.
        cpu_threads: threads of one rank's optimizer on the CPU; 0 = the ranks of a node share its cores.
        offload_streams: saved tensors go to the host and back on streams of their own, prefetched; else in line.
        narrow_keeps_inputs: linear layers in fp8 and below keep their inputs and quantise again in backward; else they
            keep the narrow copies of inputs and weights.
        narrow_amax_pass: a tensor's scale comes from its own maximum, found in a pass before the cast.
        shared_scale: what tensor ranks scale alike in 8 bits, by the largest of their maxima: none, gathered (what they
            gather) or every (all that they share out).
        narrow_weights_cached: weights are quantised once per optimizer step, not in every micro-step.
        narrow_parameters: the blocks' matrices are parameters in 8 bits, without a wider copy beside the master.
        narrow_gathers: what sequence parallelism gathers for narrow products travels in their dtype.
        sequence_first: the sequence is the outermost dimension of activations, so what tensor ranks gather or scatter
            along it is in one piece; else it is copied.
        gathers_single: a gathered single sequence is copied too, though it is in one piece.
        gathered_inputs_kept: a column-cut product keeps its input as gathered along the sequence; else its own share,
            gathered again in backward.
        tensor_overlap: the reduction of a column-cut product's input gradient runs beside its weight gradient.
        tensor_pieces: how async tensor parallelism reduces a product's sums: ring (rank by rank) or quarters (of it).
        tensor_margin_sms: SMs that a product reduced in quarters leaves to the reductions.
        pipeline_split: what stages get alike where the scenario does not say: blocks (their number) or cost (weights
            of blocks and head).
        pipeline_p2p: how stages pass tensors on unless overlap is asked for: synchronised (batched, then the host
            waits for the GPU), in turn (as well, but transfer by transfer), stream (the next kernels wait, the host
            does not).
        all_forwards_first: interleaved stages with as many micro-batches as ranks run all forwards before a backward.
        pipeline_schedules: names of the schedules that its releases have, ", " between them, or none (`schedules`).
        fsdp_generations: those that its releases have, or none (`generations`).
        pipeline_reduction: when stages reduce gradients if overlap is asked for: beside the last backward, behind it,
            or aligned (beside it, but of chunks that take turns behind each one's last).
        bucket_waits: the host waits for the device in front of every overlapped reduction of a bucket.
        overlap_interleaved: the interleaved schedule passes tensors on beside compute unless told otherwise.
        ring_merges: what the steps of ring attention make is put together by kernels of their own.
        ring_gathers: keys and values of all slices come with one call; sums are kept, and gradients travel, in fp32.
        head_exchange: how context ranks exchange tokens for heads: packed (DeepSpeed's: tensor by tensor, behind or in
            front of a copy), reordered (TransformerEngine's: beside copies to and from early and late halves; it may
            stand inside a ring), merged (one call, no copies).
        document_exchanges: ways of `parallel.context_exchange` that take documents inside a sequence.
        kv_cache: how inference's cache grows: concatenated (written anew with every token) or in_place.
        weight_hooks: weights in host memory come module by module, waited for, in front of each forward (accelerate).
        sums_kernel: whose kernels sum small tensors of tensor ranks where an engine's own are asked for (a table of
            `network/sums.yaml`).
        biased_attention: fused attention takes scores that relative positions are added to.
        quantised_products: products with weights of fewer than 16 bits: expanded (a kernel of its own makes 16-bit
            weights; int8 runs on quantised activations) or fused (the product reads them as stored).
        engine_products: kernel of fused ones under continuous batching: expanding or marlin (`Kernel.kernel`).
        vocabulary_multiple: the vocabulary is padded to a multiple of it for every tensor slice.
        nccl_release: of NCCL that came with PyTorch, unless the scenario names one.
        kernel_loading: what a CUDA context holds: all kernels, fewer (releases that ship less), or those used (lazy).
    """

    framework: str
    modules: str
    compile: bool
    host_forward_s: float
    host_backward_s: float
    host_module_s: float
    host_collective_s: float
    host_view_s: float
    host_step_s: float
    host_spread_s: float
    host_batch_s: float
    host_exchange_s: float
    host_read_s: float
    launch_queue: int
    rank_jitter_s: float
    product_rate: float
    step_sync: bool
    half_policy: str
    clip_gradients: bool
    loss: str
    cuda_kernels: bool
    blocks_in_one: bool
    compiled_end: str
    pads_products: bool
    loss_overwrites: bool
    chunked_logits_kept: bool
    chunks_cut: str
    loss_upcast: bool
    tuning_upcast: bool
    tuning_chunk: int
    metric_losses: int
    outputs_kept: bool
    stage_outputs: int
    stage_tensors_kept: bool
    early_stop: bool
    reentrant: bool
    attention_kernel: str
    fixed_order: bool
    names_algorithm: bool
    fills: str
    sdpa_kernels: str
    sdpa_flash: str
    sdpa_head: int
    sdpa_head_small: int
    sdpa_masks: bool
    sdpa_groups: bool
    sdpa_math_widens: bool
    sdpa_mask_each: bool
    sdpa_mask_always: bool
    residual_dtype_follows_autocast: bool
    low_precision_norm: bool
    unpadding: str
    shards_copied: bool
    records_streams: bool
    views_beside: bool
    whole_first_bucket: bool
    reduction_copied: bool
    step_reductions: int
    metric_gathers: int
    fused_bias_gelu: bool
    fused_swiglu: bool
    fused_rope: bool
    complex_rope: bool
    fused_latent_rope: bool
    fused_rmsnorm: bool
    fused_models: str
    fused_in_place: bool
    norm_kernel: str
    norm_quantises: str
    rmsnorm_kernel: bool
    fused_softmax: bool
    fused_dropout_add: bool
    merged_gate: bool
    separate_qkv: bool
    linear_bias: str
    projection_bias: str
    joins_heads: bool
    expands_kv: bool
    copied_heads: bool
    copied_values: bool
    heads_in_place: bool
    fused_permutation: bool
    router_launches: int
    router_backward_launches: int
    pads_rows: bool
    experts_in_turns: bool
    experts_looped: bool
    dispatch_once: bool
    dispatch_kernel: str
    dispatch_read: str
    experts_scattered: bool
    expert_overlap: str
    expert_overlap_blocks: str
    gradient_accumulation_fusion: bool
    half_accumulation_fusion: bool
    weight_placeholders: bool
    adapter_dropout: bool
    quantised_keeps_input: bool
    quantised_through_half: bool
    constants_apart: bool
    logits_held: bool
    graph_kept: bool
    frozen_apart: bool
    original_parameters: bool
    optimizer_reads: int
    sums_in_master: bool
    unscaling: str
    optimizer_kernel: str
    pinned_powers: bool
    fused_counters: bool
    muon: str
    muon_nesterov: bool
    muon_splits_qkv: bool
    gradient_path: str
    parameter_storage: str
    cpu_optimizer: str
    cpu_fuses: bool
    cpu_threads: int
    offload_streams: bool
    narrow_keeps_inputs: bool
    narrow_amax_pass: bool
    shared_scale: str
    narrow_weights_cached: bool
    narrow_parameters: bool
    narrow_gathers: bool
    nccl_release: str
    kernel_loading: str
    sequence_first: bool
    gathers_single: bool
    gathered_inputs_kept: bool
    tensor_overlap: bool
    tensor_pieces: str
    tensor_margin_sms: int
    pipeline_split: str
    pipeline_p2p: str
    all_forwards_first: bool
    pipeline_reduction: str
    pipeline_schedules: str
    fsdp_generations: str
    bucket_waits: bool
    overlap_interleaved: bool
    ring_merges: bool
    ring_gathers: bool
    head_exchange: str
    document_exchanges: str
    kv_cache: str
    weight_hooks: bool
    sums_kernel: str
    biased_attention: bool
    quantised_products: str
    engine_products: str
    vocabulary_multiple: int

    @property
    def schedules(self) -> tuple[str, ...]:
        """Pipeline schedules of the stack's own releases."""
        return () if self.pipeline_schedules == "none" else tuple(self.pipeline_schedules.split(", "))

    @property
    def generations(self) -> tuple[int, ...]:
        """Generations of FSDP of the stack's own releases."""
        return () if self.fsdp_generations == "none" else tuple(map(int, self.fsdp_generations.split(", ")))

    def copied_along(self, sequences: int) -> str:
        """What tensor ranks copy of activations cut along the sequence: what they gather and scatter ("both"), what
        they scatter alone ("scatters"), or "none".

        Args:
            sequences: of a micro-batch.
        """
        if self.sequence_first:
            return "none"
        return "both" if sequences > 1 or self.gathers_single else "scatters"

    @property
    def adds_halves(self) -> bool:
        """Whether products add weight gradients into a buffer of the weights' own width."""
        fuses = self.gradient_accumulation_fusion and self.half_accumulation_fusion
        return self.gradient_path == "grad_buffer" and fuses
