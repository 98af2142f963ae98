"""How Megatron-LM's arguments lay a job out.

Names and defaults: megatron-core 0.16.1 model_parallel_config.py, distributed/distributed_data_parallel_config.py and
transformer/transformer_block.py (get_num_layers_to_build); Megatron-LM's arguments.py (recalled).
"""

from __future__ import annotations

import re
from dataclasses import replace

from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args
from sim.imports.megatron.model import choice
from sim.imports.settings import Said

#: --data-parallel-sharding-strategy of Megatron's own FSDP -> parallel.strategy.
_SHARDS = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"}
_STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
#: Repetitions in a layout of stages, unrolled in this order; more letters than so many are no layout.
_REPEATS, _MOST_LETTERS = (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"), 100_000
_MOST_RANKS = 1_000_000
_EXCHANGES = {"p2p": "ring", "all_gather": "all-gather", "allgather": "all-gather", "a2a": "all-to-all",
              "a2a+p2p": "all-to-all"}


def read_layout(args: Args, draft: Draft) -> None:
    """Fields of `parallel`."""
    for path, *names in (("tensor", "tensor_model_parallel_size", "model_parallel_size"),
                         ("pipeline", "pipeline_model_parallel_size"),
                         ("context", "context_parallel_size", "ds_sequence_parallel_size"),
                         ("expert", "expert_model_parallel_size", "moe_expert_parallel_size")):
        said = args.get(*names)
        if said is not None and said.whole() > _MOST_RANKS:
            raise said.wrong(f"a whole number of at most {_MOST_RANKS:,}")
        if said is not None and said.whole() > 1:
            draft.take(f"parallel.{path}", said.whole(), said)
    _tensor(args, draft)
    _pipeline(args, draft)
    _sharding(args, draft)
    _overlap(args, draft)
    _experts(args, draft)


def _tensor(args: Args, draft: Draft) -> None:
    """arguments.py: sequence parallelism is switched off where there is one tensor rank."""
    cut = (draft.value("parallel.tensor") or 1) > 1
    if (said := args.on("sequence_parallel")) and cut:
        draft.take("parallel.sequence_parallel", True, said)
    if (said := args.on("tp_comm_overlap")) and cut:
        draft.take("parallel.async_tensor", True, said)
    _context(args, draft)
    if (said := args.on("use_tp_pp_dp_mapping")) is not None:
        draft.take("parallel.order", ["tensor", "context", "expert", "pipeline", "data"], said)


def _context(args: Args, draft: Draft) -> None:
    """How context ranks exchange keys and values, or tokens for heads."""
    kind, sizes = args.get("cp_comm_type"), args.get("hierarchical_context_parallel_sizes")
    ulysses = args.get("ds_sequence_parallel_size")
    if draft.value("parallel.context") is None:
        return
    if ulysses is not None and ulysses.whole() > 1:
        draft.take("parallel.context_exchange", "all-to-all", ulysses, "DeepSpeed's Ulysses")
    if kind is None:
        return
    of_layers = kind.value if isinstance(kind.value, list) else [kind.value]
    if len(set(map(str, of_layers))) > 1:
        draft.leave(kind, "layers that exchange differently are not simulated: all are counted like the first")
    first = str(of_layers[0]) if of_layers else ""
    if first not in _EXCHANGES:
        raise kind.wrong(f"one of {', '.join(_EXCHANGES)}")
    draft.take("parallel.context_exchange", _EXCHANGES[first], kind)
    if first != "a2a+p2p":
        return
    if sizes is None:
        draft.leave(kind, "hierarchical_context_parallel_sizes is missing: all context ranks exchange heads")
        return
    inner = sizes.value[0] if isinstance(sizes.value, list) and sizes.value else sizes.value
    draft.take("parallel.context_all_to_all", replace(sizes, value=inner).whole(), sizes, "ranks of the inner level")


def _pipeline(args: Args, draft: Draft) -> None:
    per_chunk = args.get("num_layers_per_virtual_pipeline_stage")
    chunks = args.get("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    first, last = (args.get(f"decoder_{end}_pipeline_num_layers", f"num_layers_in_{end}_pipeline_stage")
                   for end in ("first", "last"))
    embedding = args.on("account_for_embedding_in_pipeline_split")
    head = args.on("account_for_loss_in_pipeline_split")
    parts = args.get("pp_partition_method")
    plain, overlap = args.off("overlap_p2p_comm", "no_overlap_p2p_communication"), args.on("overlap_p2p_communication")
    scatter = args.on("no_scatter_gather_tensors_in_pipeline")
    stages, layers = draft.value("parallel.pipeline") or 1, draft.value("model.layers")
    if stages == 1:
        return
    if embedding is not None:
        draft.take("parallel.split_slots.embedding", 1, embedding)
    if head is not None:
        draft.take("parallel.split_slots.head", 1, head)
    if parts is not None:
        _parts(draft, parts)
    if chunks is not None and chunks.whole() > 1:
        draft.take("parallel.virtual_stages", chunks.whole(), chunks)
    elif per_chunk is not None and layers:
        slots = layers + (embedding is not None) + (head is not None)
        if slots % (stages * per_chunk.whole()):
            raise per_chunk.wrong(f"a number that divides {layers} layers over {stages} pipeline ranks")
        count = slots // (stages * per_chunk.whole())
        if count > 1:
            draft.take("parallel.virtual_stages", count, per_chunk)
    if layers and (first is not None or last is not None):
        _uneven(draft, stages, layers, first, last)
    if said := args.get("pipeline_model_parallel_layout"):
        _spelled(draft, said, stages, layers)
    several = draft.value("parallel.virtual_stages") is not None
    if plain is not None and several and plain.name.startswith("--"):
        draft.take("parallel.overlap_p2p", False, plain)
    elif overlap is not None and several:
        draft.take("parallel.overlap_p2p", True, overlap)
    if scatter is not None:
        draft.take("parallel.pipeline_scatter", False, scatter)


def _spelled(draft: Draft, said: Said, stages: int, layers: int | None) -> None:
    """--pipeline-model-parallel-layout: a letter a layer (t: a block), a bar behind every chunk, the chunks of a rank
    one pipeline apart (pipeline_parallel_layer_layout.py, parse_str_to_list)."""
    if not isinstance(said.value, str):
        draft.leave(said, "parallel.split, by pipeline rank, says it")
        return
    chunks = _unrolled(re.sub(r"[\s,]", "", said.value)).split("|")
    counts = [sum(chunk.count("t") for chunk in chunks[rank::stages]) for rank in range(stages)]
    if not set("".join(chunks)) <= set("ELtm") or len(chunks) % stages or (layers and sum(counts) != layers):
        blocks = f", {layers} of them t" if layers else ""
        raise said.wrong(f"E, t, m and L for the layers of {stages} pipeline ranks{blocks}, such as "
                         "'Et*3|(tt|)*29m|L'")
    virtual = len(chunks) // stages
    if virtual > 1:
        draft.take("parallel.virtual_stages", virtual, said)
    even = all([chunk.count("t") for chunk in chunks[rank::stages]]
               == [count // virtual + (i < count % virtual) for i in range(virtual)]
               for rank, count in enumerate(counts))
    note = "" if even else "the chunks of a rank are filled as evenly as possible"
    apart = any("m" in chunk for chunk in chunks[:-1])
    draft.take("parallel.split", counts, said, "blocks for further tokens stand with the head" if apart else note)


def _unrolled(text: str) -> str:
    """A layout without its repetitions; as it is from where it would grow too long."""
    for pattern in _REPEATS:
        if sum(len(found[1]) * int(found[2]) for found in re.finditer(pattern, text)) > _MOST_LETTERS:
            break
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text


def _parts(draft: Draft, said: Said) -> None:
    """--pp-partition-method (Megatron-DeepSpeed): layers of the classes named after `type:` are spread evenly. The head
    is the tied embedding's class once more (gpt_model.py, GPTModelPipe; recalled)."""
    kind, _, classes = str(said.value).lower().partition(":")
    names = set(classes.split("|"))
    if kind != "type" or not {"transformer"} <= names <= {"transformer", "embedding"}:
        draft.leave(said, "blocks are split evenly over pipeline ranks")
    elif "embedding" in names:
        draft.take("parallel.split_slots.embedding", 1, said)
        draft.take("parallel.split_slots.head", 1, said, "the embedding's class too")


def _uneven(draft: Draft, stages: int, layers: int, first: Said | None, last: Said | None) -> None:
    """Blocks of the first and last rank as given, the others share the rest evenly."""
    ends = {0: first, stages - 1: last}
    given = {rank: said.whole() for rank, said in ends.items() if said is not None}
    said = first if first is not None else last
    assert said is not None
    others, rest = stages - len(given), layers - sum(given.values())
    if rest < 0 or (others and rest % others) or (not others and rest):
        raise said.wrong(f"a number that leaves the other {others} of {stages} pipeline ranks equal shares of "
                         f"{layers} layers")
    draft.take("parallel.split", [given.get(rank, rest // others if others else 0) for rank in range(stages)], said)


def _sharding(args: Args, draft: Draft) -> None:
    """Data parallelism: plain copies unless something shards them."""
    path = "parallel.strategy"
    shards = args.get("data_parallel_sharding_strategy")
    optimizer, own = args.on("use_distributed_optimizer"), args.on("use_megatron_fsdp", "use_custom_fsdp")
    torch, stage, deep = args.on("use_torch_fsdp2"), args.get("zero_stage"), args.on("deepspeed")
    kept, groups = args.on("torch_fsdp2_no_reshard_after_forward"), args.get("num_distributed_optimizer_instances")
    if torch is not None:
        draft.take(path, "fsdp", torch)
        draft.assume("software.fsdp", 2, "--use-torch-fsdp2")
        if kept is not None:
            draft.take("parallel.reshard_after_forward", False, kept)
    elif own is not None:
        draft.take(path, choice(shards, _SHARDS) if shards is not None else "ddp", shards or own)
    elif deep is not None and shards_masters(args, draft):
        draft.take(path, "zero1", stage or deep, "DeepSpeed's BF16_Optimizer shares fp32 masters out over data ranks")
    elif deep is not None and stage is not None:
        draft.take(path, choice(stage, _STAGES), stage)
    elif optimizer is not None:
        draft.take(path, "zero1", optimizer)
    if groups is not None and groups.whole() > 1:
        draft.take_later("parallel.sharding_factor", lambda ranks: ranks.shared_by(groups), groups,
                         f"{groups.whole()} instances of the optimizer")


def shards_masters(args: Args, draft: Draft) -> bool:
    """Whether DeepSpeed's BF16_Optimizer steps: bf16 in a pipeline without ZeRO (deepspeed 0.19.8 runtime/engine.py,
    _do_optimizer_sanity_check; runtime/bf16_optimizer.py: fp32 masters and gradients in partitions of data ranks)."""
    stage, pipeline = args.get("zero_stage"), draft.value("parallel.pipeline") or 1
    without = stage is None or stage.word() == "0"
    deep, half, alone = args.on("deepspeed"), args.on("bf16"), args.on("no_pipeline_parallel")
    return deep is not None and half is not None and alone is None and without and pipeline > 1


def _overlap(args: Args, draft: Draft) -> None:
    """Gradients are reduced when backward is over, and parameters gathered before forward, unless the arguments say
    otherwise (distributed_data_parallel_config.py); Megatron's FSDP, PyTorch's and DeepSpeed overlap of themselves."""
    reduces, gathers = args.on("overlap_grad_reduce"), args.on("overlap_param_gather")
    no_reduce = args.off("overlap_grad_reduce", "no_overlap_grad_reduce")
    size, old = args.get("ddp_bucket_size", "bucket_size"), args.get("DDP_impl")
    strategy = draft.value("parallel.strategy")
    of_itself = args.on("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "deepspeed")
    if reduces is not None:
        draft.take("parallel.overlap", True, reduces)
        if gathers is None and strategy == "zero1":
            draft.leave(reduces, "gathers of parameters are counted as overlapped too, which --overlap-param-gather "
                                 "would ask for")
    elif no_reduce is not None:
        draft.take("parallel.overlap", False, no_reduce)
    elif old is not None and old.word() == "torch":
        draft.take("parallel.overlap", True, old, "PyTorch's DDP")
    elif of_itself is None:
        draft.assume("parallel.overlap", False, "without --overlap-grad-reduce")
    if size is not None:
        each = 2 if args.on("grad_reduce_in_bf16", "fp16") else 4
        draft.take("parallel.bucket_mb", max(1, round(size.whole() * each / 2**20)), size)


def _experts(args: Args, draft: Draft) -> None:
    """What experts' parallelism adds; a model without experts ignores it. Shared experts run beside all-to-alls alone
    (transformer_config.py, __post_init__: moe_shared_expert_overlap only works with alltoall token dispatcher)."""
    cut, kind = args.get("expert_tensor_parallel_size"), args.get("moe_token_dispatcher_type")
    shared, batches = args.on("moe_shared_expert_overlap"), args.on("overlap_moe_expert_parallel_comm")
    if draft.value("parallel.expert") is None:
        return
    tensor = draft.value("parallel.tensor") or 1
    if cut is not None and cut.whole() in (1, tensor):
        draft.take("parallel.expert_tensor", cut.whole(), cut)
    elif cut is not None:
        draft.leave(cut, "experts are whole on every rank or cut over all tensor ranks")
    elif tensor > 1:
        draft.assume("parallel.expert_tensor", tensor, "expert_tensor_parallel_size is the tensor ranks' unless given "
                                                       "(model_parallel_config.py)")
    if kind is not None and kind.word() == "allgather":
        draft.leave(kind, "tokens go to experts by all-to-all")
    if batches is not None:
        draft.take("parallel.overlap_experts", "batches", batches)
    elif shared is not None and _sends_once(args, kind):
        draft.leave(shared, "Megatron runs shared experts beside all-to-alls alone, and refuses this dispatcher")
    elif shared is not None and draft.value("model.moe.shared_experts"):
        draft.take("parallel.overlap_experts", "shared", shared)


def _sends_once(args: Args, kind: Said | None) -> bool:
    """Whether the dispatcher sends a token once to a place (flex), not a row to each of its experts."""
    return args.on("moe_enable_deepep") is not None or (kind is not None and kind.word() == "flex")
