"""How torchtitan lays a job out: degrees, what is sharded, pipelines and the batch that goes through them.

Sources: torchtitan 0.1.0 distributed/pipeline.py, models/llama3/infra/parallelize.py and pipeline.py; 0.2.2
distributed/parallel_dims.py, distributed/pipeline_parallel.py and train.py; of 2024 parallelisms/ (recalled).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from sim.imports.draft import Draft
from sim.imports.settings import Said, Settings, one_of, peek

#: Tables that have had the settings of parallelism, newest first.
_TABLES = ("parallelism", "experimental", "training")
#: Schedules of torch.distributed.pipelining by name -> (schedule, chunks of a rank, what is not simulated of it).
_SCHEDULES: dict[str, tuple[str, int, str]] = {
    "1f1b": ("1f1b", 1, ""),
    "gpipe": ("gpipe", 1, ""),
    "interleaved1f1b": ("interleaved", 2, ""),
    "flexibleinterleaved1f1b": ("interleaved", 2, ""),
    "loopedbfs": ("interleaved", 2, "breadth-first order of the chunks is not simulated: interleaved 1F1B is counted"),
    "interleavedzerobubble": ("interleaved", 2, "gradients of weights that fill the bubbles of an interleaved pipeline "
                              "are not simulated: interleaved 1F1B is counted"),
    "zbvzerobubble": ("zb-v", 2, ""),
    "dualpipev": ("zb-v", 2, "forwards beside backwards are not simulated: ZB-V, folded alike, is counted"),
}
_MOST_RANKS = 1_000_000
_RESHARD = {"default": None, "always": True, "never": False}


@dataclass(frozen=True, slots=True)
class _Micro:
    """A pipeline's micro-batches: what says their size (without it, one sequence), or their number if that is said."""

    size: Said | None = None
    number: int = 0


def degree(settings: Settings, *names: str) -> Said | None:
    """A setting of parallelism, wherever its era has it.

    Raises:
        UserError: tables of two eras have it, and say different things.
    """
    places = [f"{where}.{name}" for where in _TABLES for name in names]
    told = [said for place in places if (said := peek(settings, place)) is not None]
    for other in told[1:]:
        if other.value != told[0].value:
            raise other.clash(f"says {other.value!r}, but {told[0].name} (line {told[0].line}) says {told[0].value!r}")
    return settings.get(*places)


def read_layout(settings: Settings, draft: Draft, layers: int | None) -> str:
    """Fields of `parallel`, and the batch.

    Returns:
        Who takes care of dtypes: "fsdp", "autocast", or "none beside other ranks".
    """
    ranks = {axis: degree(settings, f"{axis}_parallel_degree") for axis in ("tensor", "context", "pipeline", "expert")}
    sizes = {axis: said.whole() if said is not None else 1 for axis, said in ranks.items()}
    for axis, said in ranks.items():
        if said is not None and sizes[axis] > _MOST_RANKS:
            raise said.wrong(f"a whole number of at most {_MOST_RANKS:,}")
        if said is not None and sizes[axis] > 1:
            draft.take(f"parallel.{axis}", sizes[axis], said)
    if ranks["tensor"] is not None and sizes["tensor"] > 1:
        # apply_tp: norms and what follows them are always sharded along the sequence
        draft.take("parallel.sequence_parallel", True, ranks["tensor"])
    overlapped = degree(settings, "enable_async_tensor_parallel")
    if overlapped is not None and overlapped.flag() and sizes["tensor"] > 1:
        draft.take("parallel.async_tensor", True, overlapped)
    _exchange(settings, draft, sizes["context"])
    _experts(settings, draft, sizes)
    sharded = _sharding(settings, draft, sizes)
    micro = _pipeline(settings, draft, sizes["pipeline"], layers)
    _batch(settings, draft, micro)
    return sharded


def _exchange(settings: Settings, draft: Draft, context: int) -> None:
    said = degree(settings, "context_parallel_rotate_method")
    way = {"allgather": "all-gather", "alltoall": "ring"}
    if said is not None and said.word() not in way:
        raise said.wrong(f"one of {', '.join(way)}")
    if context > 1 and said is not None:
        draft.take("parallel.context_exchange", way[said.word()], said)
    elif context > 1:
        draft.assume("parallel.context_exchange", "all-gather", "context_parallel_rotate_method of job_config.py")


def _experts(settings: Settings, draft: Draft, sizes: dict[str, int]) -> None:
    cut, backend = degree(settings, "expert_tensor_parallel_degree"), degree(settings, "expert_parallel_comm_backend")
    if sizes["expert"] == 1:
        return
    said = cut or degree(settings, "expert_parallel_degree")
    if said is not None and sizes["tensor"] > 1:
        draft.take("parallel.expert_tensor", cut.whole() if cut is not None else 1, said)
    if backend is not None:
        draft.take("software.dispatcher", "alltoall" if backend.word() == "standard" else "flex", backend)


def _sharding(settings: Settings, draft: Draft, sizes: dict[str, int]) -> str:
    """FSDP 2 over data_parallel_shard_degree x context ranks, replicated where data_parallel_replicate_degree says so
    (HSDP); DDP where nothing is sharded. Every degree said, their product is the job's GPUs (parallel_dims.py)."""
    shard = degree(settings, "data_parallel_shard_degree", "data_parallel_degree")
    copies = degree(settings, "data_parallel_replicate_degree")
    if shard is not None and shard.whole(-1) == 0:
        raise shard.wrong("-1, or a whole number of at least 1")
    over = shard.whole(-1) if shard is not None else -1
    replicas = copies.whole() if copies is not None else 1
    kind = settings.get("training.data_parallel_type")  # of spring 2024 (recalled)
    if kind is not None and one_of(kind, {"fsdp": False, "ddp": True}):
        if over > 0 and shard is not None:
            draft.gpus = Said(shard.file, shard.name, over * sizes["tensor"] * sizes["pipeline"], shard.line)
        return _copies(draft, kind, None, over, sizes)
    if shard is not None and over > 0:
        product = over * replicas * sizes["tensor"] * sizes["context"] * sizes["pipeline"]
        draft.gpus = Said(shard.file, shard.name, product, shard.line)
    policy = degree(settings, "fsdp_reshard_after_forward")
    if policy is not None and policy.word() not in _RESHARD:
        raise policy.wrong(f"one of {', '.join(_RESHARD)}")
    if over == 1 and sizes["context"] == 1:
        return _copies(draft, shard, copies, replicas, sizes)
    if shard is not None and over != -1:
        draft.take("parallel.strategy", "fsdp", shard)
    else:
        draft.assume("parallel.strategy", "fsdp", "data_parallel_shard_degree -1: all data-parallel ranks")
    if policy is not None and (after := _RESHARD[policy.word()]) is not None:
        draft.take("parallel.reshard_after_forward", after, policy)
    if copies is not None and replicas > 1:
        if over > 0:
            draft.take("parallel.sharding_factor", over * sizes["context"], copies)
        else:
            draft.take_later("parallel.sharding_factor", lambda ranks: ranks.shared_by(copies), copies,
                             f"what {replicas} replicas leave of the GPUs shares the shards")
    return "fsdp"


def _copies(draft: Draft, shard: Said | None, copies: Said | None, replicas: int, sizes: dict[str, int]) -> str:
    """Nothing is sharded: DDP with buckets of 100 MB (apply_ddp), or one replica; -1 = as many as there are."""
    said = copies if copies is not None and replicas > 1 else shard
    assert said is not None
    draft.take("parallel.strategy", "none" if replicas == 1 else "ddp", said)
    if replicas != 1:
        draft.assume("parallel.bucket_mb", 100, "bucket_cap_mb of apply_ddp")
        draft.assume("parallel.reduce_every_micro_step", True, "train.py accumulates without no_sync")
    return "none beside other ranks" if max(sizes["tensor"], sizes["pipeline"]) > 1 else "autocast"


def _pipeline(settings: Settings, draft: Draft, stages: int, layers: int | None) -> _Micro | None:
    """Schedule, chunks and split; the micro-batches of a pipeline, if there is one."""
    schedule = degree(settings, "pipeline_parallel_schedule")
    points, parts = degree(settings, "pipeline_parallel_split_points"), degree(settings, "module_fqns_per_model_part")
    per_stage = degree(settings, "pipeline_parallel_layers_per_stage")
    ends = [degree(settings, f"pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")]
    size = degree(settings, "pipeline_parallel_microbatch_size")
    number = degree(settings, "pipeline_parallel_microbatches")
    if schedule is not None and schedule.word().replace("_", "") not in _SCHEDULES:
        raise schedule.wrong("one of 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, "
                             "DualPipeV")
    if stages == 1:
        return None
    name, chunks, lacks = _SCHEDULES[schedule.word().replace("_", "") if schedule is not None else "1f1b"]
    if schedule is not None:
        draft.take("parallel.schedule", name, schedule)
    if schedule is not None and lacks:
        draft.leave(schedule, lacks)
    weights = [end.whole(0) if end is not None else 1 for end in ends]
    split = next((one for one in (points, parts) if one is not None and one.value), None)
    if split is not None:
        counts = _by_point(split, layers) if split is points else _by_part(split)
        if len(counts) % stages or (len(counts) // stages > 1 and chunks == 1):
            raise split.wrong(f"{stages * chunks} stages, or another multiple of {stages} where a rank has several, "
                              f"not {len(counts)}")
        chunks = len(counts) // stages
        _given_split(draft, split, counts, stages, name == "zb-v")
    elif per_stage is not None and layers is not None:
        whole = -(-(layers + sum(weights)) // per_stage.whole())
        if whole % stages:
            raise per_stage.wrong(f"a number that makes stages a multiple of {stages}, not {whole} of them")
        chunks = whole // stages
    if chunks > 1 and (said := split or per_stage or schedule) is not None:
        draft.take("parallel.virtual_stages", chunks, said)
    old = settings.has("experimental.pipeline_parallel_degree")
    for end, weight, less in zip(("embedding", "head"), weights, ends, strict=True):
        if split is None and less is not None:
            draft.take(f"parallel.split_slots.{end}", weight, less)
        elif split is None and not old:
            draft.assume(f"parallel.split_slots.{end}", weight, "a block less on the first and the last stage")
    if number is not None or (old and size is None):
        return _Micro(number=number.whole() if number is not None else stages * chunks)
    return _Micro(size)


def _by_point(said: Said, layers: int | None) -> list[int]:
    """Blocks of each stage from where the next begins: ["layers.8", "layers.16"]."""
    names = said.value if isinstance(said.value, list) else str(said.value).split(",")
    found = [re.fullmatch(r"layers\.(\d{1,6})", str(name).strip()) for name in names]
    starts = [0, *(int(one[1]) for one in found if one is not None), layers or 0]
    if None in found or layers is None or starts != sorted(starts):
        raise said.wrong("names of blocks in order, such as layers.8, of a model that is known here")
    return [after - before for before, after in pairwise(starts)]


def _by_part(said: Said) -> list[int]:
    """Blocks of each stage from the names of its modules."""
    if not isinstance(said.value, list) or not all(isinstance(part, list) for part in said.value):
        raise said.wrong("a list of lists of modules' names")
    return [sum(str(name).startswith("layers.") for name in part) for part in said.value]


def _given_split(draft: Draft, said: Said, counts: list[int], stages: int, folded: bool) -> None:
    """Blocks of each rank: stages go round the ranks, or there and back (stage_ids_this_rank)."""
    of_rank = [0] * stages
    for stage, count in enumerate(counts):
        turn, rank = divmod(stage, stages)
        of_rank[stages - 1 - rank if folded and turn else rank] += count
    draft.take("parallel.split", of_rank, said)


def _batch(settings: Settings, draft: Draft, micro: _Micro | None) -> None:
    """Sequences. Without a pipeline local_batch_size goes through at once; a pipeline takes it apart into micro-batches
    of pipeline_parallel_microbatch_size (of 2024: pipeline_parallel_microbatches of them). global_batch_size is
    local_batch_size x data-parallel ranks unless it is said (train.py)."""
    local = settings.get("training.local_batch_size", "training.batch_size")
    whole = settings.get("training.global_batch_size")
    given = Said(settings.file, "training.local_batch_size", 8) if local is None else local
    size, count = given.whole(), 1
    if micro is not None and micro.number:
        count = micro.number
    elif micro is not None:
        count = max(1, size // (micro.size.whole() if micro.size is not None else 1))
    each = size // count
    if each * count != size or (micro is not None and micro.size is not None and micro.size.whole() != each):
        raise given.wrong(f"a batch of whole micro-batches ({count} of them)" if micro is None or micro.size is None
                          else f"a multiple of {micro.size.name} {micro.size.whole()}")
    fields = {"training.micro_batch": each}
    if whole is not None and whole.whole(-1) > 0:
        draft.take("training.global_batch", whole.whole(), whole)
        if micro is not None:
            draft.leave(whole, "all of it is counted as one run of the pipeline, which torchtitan empties after every "
                               "local batch")
    else:
        fields["training.micro_steps"] = count
    for path, value in fields.items():
        if local is not None:
            draft.take(path, value, local)
        else:
            draft.assume(path, value, "local_batch_size 8 of job_config.py")
