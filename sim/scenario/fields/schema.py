"""Everything a user can say, as one typed tree; the field names are the product's main interface.

The same classes serve twice. Validated from what a user wrote, a field that was left out and whose default depends on
other fields holds None; `defaults.fill` then replaces every such None, so that all other rooms see concrete values of
the annotated type. Fields made with `late` are those.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PlainValidator, PrivateAttr, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from sim.scenario.fields.asked_stack import Software
from sim.scenario.fields.claim import Claim
from sim.scenario.fields.cluster import Cluster, Dtype
from sim.scenario.fields.model import Model, Probability
from sim.scenario.fields.precisions import PRECISIONS
from sim.scenario.fields.tables import (
    Degree,
    Given,
    LayersOrNone,
    Sequences,
    Table,
    Text,
    Tokens,
    TokensOrNone,
    count,
    has,
    late,
    needs,
    or_word,
    switch_or_count,
    word_or_number,
)
from sim.scenario.fields.units import BetweenFailures, BytesPerSecond, Mib, SampleBytes, Seconds

DtypeOrNone = Literal["none", "fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8", "int4"]
Strategy = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe"]
#: Two stages of the model (zb-v), or one stage in each direction (dualpipe), on every rank; one has the first and last.
TWO_CHUNKS = ("zb-v", "dualpipe")
Optimizer = Literal["adamw", "adam", "adamw-8bit", "sgd", "sgd-momentum", "adafactor", "lamb", "muon", "none"]
Place = Literal["none", "cpu", "nvme", "paged"]
Axis = Literal["tensor", "context", "expert", "data", "pipeline"]
Target = Literal["query", "key", "value", "projection", "mlp", "head"]

#: `sharding_factor: full` until `defaults.fill` knows the number of ranks.
FULL = 0


# ----------------------------------------------------------------------------------------------------------- training
class Precision(Table):
    """Seven dtypes; `gather` and `reduce` are those on the wire for parameters and gradients."""

    name: str = has("custom", "one of the named precisions, whose dtypes hold where none stands beside it")
    compute: Dtype = needs("of matrix products")
    parameters: Literal[Dtype, "nf4", "nf4-dq"] = needs("of the parameters the model computes with")
    master: DtypeOrNone = needs("of the optimizer's copy of the parameters")
    gradients: Dtype = needs("of stored gradients")
    optimizer: Dtype = needs("of optimizer states")
    gather: Dtype = needs("of gathered parameters on the wire")
    reduce: Dtype = needs("of reduced gradients on the wire")


def named_precision(value: Any) -> Any:
    """The mapping behind a precision's name. A mapping goes through."""
    if isinstance(value, str):
        if value not in PRECISIONS:
            raise PydanticCustomError("choice", "unknown precision", {"value": value, "allowed": ",".join(PRECISIONS)})
        return {"name": value, **PRECISIONS[value]}
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] in PRECISIONS:
        base = PRECISIONS[value["name"]]
        changed = any(value.get(field, dtype) != dtype for field, dtype in base.items())
        return {**base, **value, "name": "custom" if changed else value["name"]}
    if not isinstance(value, dict | Precision):
        raise PydanticCustomError("plain", "expected the name of a precision or a mapping of its seven dtypes")
    return value


class RecomputeLayers(Table):
    """Full recomputation of the first blocks only, in a pipeline of each rank's first ones, its chunks together."""

    layers: LayersOrNone = needs("blocks recomputed, of a pipeline on each rank")


#: Megatron-LM's `--recompute-modules` (core/transformer/transformer_config.py).
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class RecomputeModules(Table):
    """Recomputation of some parts of every block, as Megatron names them."""

    modules: Annotated[list[Module], Field(min_length=1, max_length=7)] = needs("parts of a block, Megatron's names")


def _all_targets(value: Any) -> Any:
    linear = ["query", "key", "value", "projection", "mlp"]  # of every block, as peft's all-linear
    return linear if value == "all-linear" else [*linear, "head"] if value == "all" else value


class Finetune(Table):
    """What is trained: everything, or small matrices beside frozen weights."""

    method: Literal["full", "lora", "qlora", "adapter"] = has("full", "method")
    rank: Annotated[int, Field(ge=0, le=100_000)] = late(
        "rank of LoRA's matrices, or width of an adapter; none given = 8")
    targets: Annotated[
        list[Target],
        BeforeValidator(_all_targets),
        Field(max_length=20),
        WithJsonSchema({"anyOf": [{"enum": ["all", "all-linear"]},
                                  {"type": "array", "items": {"enum": list(Target.__args__)}}]}),
    ] = late("matrices that get one; all-linear = all but the head, as peft's; none given = query and value")
    base: Literal["fp32", "bf16", "fp16", "int8", "int4", "nf4", "nf4-dq"] = late(
        "dtype of the frozen weights; none given = the parameters', of qlora nf4")
    unquantised: Literal["fp32", "bf16", "fp16"] | None = has(
        None, "dtype of what a quantised base leaves as it is (embeddings, norms, head); none = that of the trained "
        "weights, as peft's prepare_model_for_kbit_training has it")
    dropout: Probability | None = has(
        None, "dropout in front of LoRA's matrices; none = as the framework's scripts have it")


class Muon(Table):
    """How `optimizer: muon` orthogonalises matrices; everything else of the model has AdamW."""

    ns_steps: Annotated[int, count(99)] = has(5, "Newton-Schulz iterations")
    nesterov: bool | None = has(None, "Nesterov momentum; none given = as the framework has it")
    split_qkv: bool | None = has(
        None, "queries, keys and values of one matrix apart; none given = as the framework has it")
    tensor: Literal["blockwise", "duplicated", "distributed"] | None = has(
        None, "tensor ranks: each its own slice, all the whole matrix, or together (Megatron's --muon-tp-mode); none "
        "given = as the framework has it")


def matrix_dtype(finetune: Finetune | None, precision: Precision) -> str:
    """See `Training.matrix_dtype`."""
    narrow = finetune is not None and finetune.method != "full" and finetune.base in ("fp16", "bf16")
    if finetune is not None and narrow and precision.compute in ("fp32", "tf32"):
        return finetune.base
    return precision.compute


class Documents(Table):
    """Documents that are packed into a sequence and between which attention does not cross."""

    mean: Tokens = needs("mean tokens of a document within its sequence")
    spread: Annotated[float, Field(ge=0, le=1000)] = has(0.0, "standard deviation of their lengths over the mean")


class InferenceRun(Table):
    """Sizes of an inference run."""

    prompt: Tokens = needs("tokens of the prompt, which is the encoder's where there is one")
    generate: TokensOrNone = needs("tokens generated; of an encoder none: 0, or left out")
    batch: Sequences = needs("sequences at once")
    all_reduce: Literal["nccl", "peers"] = has(
        "nccl", "small sums of tensor ranks: NCCL's, or kernels of the engine's own over NVLink: those of the engine "
        "that software.versions names (vllm, sglang, tensorrt_llm; vllm and flashinfer: fused ones), else vLLM's first")
    kv_cache: Literal["same", "fp8", "int8"] = has("same", "cache of keys and values: same as activations, fp8 or int8")
    batching: Literal["static", "continuous"] = has(
        "static", "static = the prompts together, then a token of each; continuous = as engines under load: an answer "
        "that ends makes room for the next prompt, which is read beside the tokens of the others")
    token_budget: Tokens = has(
        8192, "tokens that an iteration takes at most under continuous batching (vLLM's max_num_batched_tokens, "
        "TensorRT-LLM's max_num_tokens); longer prompts are read in parts")


class Inference(Table):
    """Forward only, with a cache of keys and values."""

    inference: InferenceRun = needs("prompt, generate, batch")


def _name_or_table(value: Any) -> str:
    return "table" if isinstance(value, dict | BaseModel) else "name"


def _name_layers_or_modules(value: Any) -> str:
    table = isinstance(value, dict) and any(str(key).startswith("mod") for key in value)
    if table or isinstance(value, RecomputeModules):
        return "modules"
    return _name_or_table(value)


_BY_KIND = Discriminator(_name_or_table)
Recompute = Annotated[
    Annotated[Literal["none", "full", "selective", "selective-op"], Tag("name")]
    | Annotated[RecomputeLayers, Tag("table")]
    | Annotated[RecomputeModules, Tag("modules")],
    Discriminator(_name_layers_or_modules),
]
Document = Annotated[Annotated[Tokens, Tag("name")] | Annotated[Documents, Tag("table")], _BY_KIND]
Mode = Annotated[Annotated[Literal["train"], Tag("name")] | Annotated[Inference, Tag("table")], _BY_KIND]


class Training(Table):
    """Batch, dtypes, optimizer and what saves memory."""

    micro_batch: Sequences = needs("sequences one replica takes through one forward and backward")
    global_batch: Sequences = late("sequences per optimizer step over the whole job; none given = of micro_steps")
    micro_steps: Annotated[int, count(1_000_000)] | None = has(None, "instead of global_batch: micro-steps per step")
    sequence: Tokens = needs("tokens per sequence")
    document: Document | None = has(
        None, "mean tokens of the documents packed into a sequence, whose attention keeps to them; with their spread "
        "{mean: 500, spread: 1.2}; none = attention sees the whole sequence")
    decoder_sequence: Tokens = late("tokens per decoder sequence; none given = sequence")
    predicted_tokens: Tokens = late("tokens per sequence that reach the vocabulary head; none given = all")
    precision: Annotated[Precision, BeforeValidator(named_precision)] = late(
        "a name or seven dtypes; none given = amp-bf16, where the GPU has no bf16 amp-fp16")
    optimizer: Optimizer = has("adamw", "optimizer")
    muon: Muon | None = has(None, "of optimizer muon")
    recompute: Recompute = has("none", "activation checkpointing")
    attention: Literal["eager", "flash", "sdpa"] = late(
        "eager materialises the score matrix, flash is a kernel that takes windows and grouped heads, sdpa PyTorch's "
        "scaled_dot_product_attention with whichever of its kernels takes the call; none given = flash where the GPU "
        "has bf16 and products are in 16 bits, whatever the year")
    optimizer_in_backward: bool = has(False, "gradients are freed as they are applied")
    chunked_loss: bool = has(False, "logits and loss in chunks")
    sample_bytes: SampleBytes | None = has(None, "read from host.storage per sequence; none = data is in host memory")
    finetune: Finetune = late("what is trained")
    mode: Mode = has("train", "train, or inference")

    @property
    def matrix_dtype(self) -> str:
        """Dtype in which the model's matrices are multiplied: the precision's, or that of 16-bit frozen weights beside
        fp32 adapters, which nothing casts (no autocast: its compute dtype is a 16-bit one)."""
        return matrix_dtype(self.finetune, self.precision)

    @property
    def documents(self) -> Documents | None:
        """The documents inside a sequence; a number is their mean alone."""
        return Documents(mean=self.document) if isinstance(self.document, int) else self.document

    @property
    def attended(self) -> float:
        """Tokens of the document in which a mean token stands: squares of the documents' lengths, over tokens. Work of
        attention goes by that, E[length^2] / E[length] = mean (1 + spread^2), and not by the mean; without documents
        it is the sequence."""
        documents = self.documents
        return float(self.sequence) if documents is None else documents.mean * (1.0 + documents.spread**2)

    @property
    def packed(self) -> bool:
        """Whether a sequence holds several documents, so that attention sees less than all of it."""
        return self.documents is not None and self.attended < self.sequence


# ----------------------------------------------------------------------------------------------------------- parallel
class Prefetch(Table):
    """FSDP's prefetch and rate limiter."""

    forward: bool = has(False, "gather the next unit before this one computes")
    backward: Literal["pre", "post", "none"] = has(
        "pre", "when the next unit of backward is gathered (PyTorch's default is none before 2.0)")
    limit: Annotated[int | None, word_or_number("none", "a whole number", 10_000, result=None), or_word("none")] = has(
        2, "gathers in flight"
    )


class SplitSlots(Table):
    """Work of embedding and head, in blocks, when blocks are split evenly over stages."""

    embedding: Annotated[int, Field(ge=0, le=10_000)] = has(0, "blocks' worth of the embedding")
    head: Annotated[int, Field(ge=0, le=10_000)] = has(0, "blocks' worth of the head")


class Offload(Table):
    """What lives outside the GPU."""

    parameters: Place = has("none", "where parameters live")
    optimizer: Place = has("none", "where optimizer states live")
    activations: Place = has("none", "where activations live")
    optimizer_fraction: Annotated[float, Field(gt=0, le=1)] = has(
        1.0, "share of the parameters whose optimizer is outside (Megatron's --optimizer-offload-fraction)")


class Parallel(Table):
    """How the job is laid out on the GPUs."""

    strategy: Strategy = late("data parallelism; none given = ddp, on one GPU none")
    sharding_factor: Annotated[
        int, word_or_number("full", "a whole number of GPUs", 1_000_000, result=FULL), or_word("full")
    ] = late("GPUs over which each parameter is split, or full (all that hold the same slice); none given = full")
    reshard_after_forward: Annotated[
        bool | int,
        PlainValidator(switch_or_count),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1}]}),
    ] = has(True, "false keeps gathered parameters until backward; int = reshard to that many GPUs (in DeepSpeed's "
            "ZeRO-3 zero_hpz_partition_size)")
    hierarchical_gather: bool = has(
        False, "MiCS gathers between nodes first, then inside (mics_hierarchical_params_gather)")
    prefetch: Prefetch = late("FSDP's prefetch and rate limiter")
    wrap: Annotated[
        Literal["block"] | int, word_or_number("block", "a number of parameters", 10**13), or_word("block")
    ] = has("block", "unit of gathering: a block, or so many parameters")
    bucket_mb: Mib = has(25.0, "MiB of a gradient bucket; 25 is DDP's, and where a framework counts otherwise its own")
    gradient_as_bucket_view: bool = has(False, "DDP's gradients are views of its buckets")
    reduce_every_micro_step: bool = late(
        "gradient accumulation without no_sync; none given = true of fsdp, zero2 and zero3")
    overlap: bool = has(True, "reduce gradients and gather parameters during compute")
    tensor: Degree = has(1, "tensor parallelism")
    sequence_parallel: bool = has(False, "Megatron's sequence parallelism")
    async_tensor: bool = late("overlapped tensor parallelism; none given = what the stack does")
    context: Degree = has(1, "context parallelism")
    context_exchange: Literal["ring", "all-gather", "all-to-all"] = has(
        "ring", "keys and values go round a ring, are gathered, or tokens are exchanged for heads (Ulysses)")
    context_all_to_all: Degree | None = has(
        None, "context ranks that exchange tokens for heads, with a ring between such sets (Megatron's a2a+p2p); none "
        "given = all of them")
    expert: Degree = has(1, "expert parallelism")
    expert_tensor: Degree | None = has(
        None, "slices an expert's width is cut into (Megatron's expert_tensor_parallel_size): 1 or as many as tensor; "
        "none given = the tensor ranks where expert divides data · context, else 1")
    overlap_experts: Literal["none", "shared", "batches"] | None = has(
        None, "what hides tokens on their way to experts: nothing, shared experts, another micro-batch's compute; none "
        "given = what the stack does")
    pipeline: Degree = has(1, "pipeline stages")
    virtual_stages: Annotated[int, count(10_000)] = late(
        "chunks of each pipeline rank; none given = 1, of zb-v and dualpipe 2")
    schedule: Schedule = late(
        "order of the pipeline's micro-batches; none given = 1f1b, with virtual_stages interleaved")
    split: Annotated[list[LayersOrNone], Field(max_length=100_000)] | None = has(
        None, "blocks per pipeline rank; none given = as evenly as they go")
    overlap_p2p: bool | None = has(
        None, "transfers between stages overlap with compute; none given = what the stack does")
    split_slots: SplitSlots = late("work of embedding and head when splitting evenly")
    pipeline_scatter: bool = late("each tensor rank sends its share between stages; none given = what the stack does")
    order: list[Axis] = late(
        "which ranks are neighbours, first = same node; none given = tensor, context, expert, data, pipeline")
    offload: Offload = late("what lives outside the GPU")


# --------------------------------------------------------------------------------------------------------------- budget
class Budget(Table):
    """Length of the run and money; times in seconds once read."""

    tokens: (
        Annotated[
            Literal["chinchilla"] | float,
            word_or_number("chinchilla", "a number of tokens", 10**18, whole=False),
            WithJsonSchema({"anyOf": [{"const": "chinchilla"}, {"type": "number", "exclusiveMinimum": 0}]}),
        ]
        | None
    ) = has(None, "tokens")
    price_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6)] | None = has(None, "USD")
    deadline: Seconds | None = has(None, "longest run allowed")
    mtbf_per_gpu: BetweenFailures | None = has(None, "mean time between failures of one GPU")
    checkpoint_every: Seconds | None = has(None, "work between two checkpoints; none = the best")
    restart: Seconds | None = has(None, "from a failure to reading the last checkpoint: spare node, start of the job")
    storage: BytesPerSecond | None = has(None, "checkpoints of the whole job, no faster than this; none = nodes' disks")


class Scenario(Table):
    """One resolved scenario: what is trained, on what, and how, with every default filled in."""

    _given: Given | None = PrivateAttr(default=None)

    name: Text = needs("shown in every report")
    cluster: Cluster = needs("hardware")
    model: Model = needs("architecture")
    training: Training = needs("batch, precision, optimizer, memory-saving techniques")
    parallel: Parallel = late("how the job is laid out on the GPUs")
    software: Software = late("which stack runs it")
    budget: Budget | None = has(None, "run length and money")
    sweep: dict[str, list[Any]] = late("what-if axes: dotted field -> list of values")
    expect: dict[str, Any] = late("regression bounds: result field -> bound")
    claim: Claim | None = has(None, "a claim this scenario puts to the test")

    @property
    def given(self) -> Given | None:
        """What its user wrote, where it was read from that."""
        return self._given

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Replicas: GPUs / (tensor · context · pipeline)."""
        return self.gpus // (self.parallel.tensor * self.parallel.context * self.parallel.pipeline)

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold the same parameters, data · context: gradients are summed over them, states sharded."""
        return self.data_parallel * self.parallel.context

    @property
    def head_ranks(self) -> int:
        """Context ranks that exchange tokens for heads before attention; 1 = none do."""
        parallel = self.parallel
        if parallel.context_exchange != "all-to-all":
            return 1
        return min(parallel.context, parallel.context_all_to_all or parallel.context)

    @property
    def expert_tensor(self) -> int:
        """Slices an expert's width is cut into: what is asked for, else the tensor ranks, unless the experts are spread
        over these too, as they always are in inference."""
        parallel = self.parallel
        if self.training.mode != "train" or parallel.expert == 1:
            return parallel.tensor if parallel.expert == 1 else 1
        if parallel.expert_tensor is not None:
            return parallel.expert_tensor
        return parallel.tensor if self.replica_ranks % parallel.expert == 0 else 1

    @property
    def micro_steps(self) -> int:
        """Forward-backward passes of one replica per optimizer step."""
        return -(-(self.training.global_batch // self.data_parallel) // self.training.micro_batch)

    @property
    def last_micro_batch(self) -> int:
        """Sequences of the last micro-step: less than micro_batch where the replica's share is not a multiple."""
        share = self.training.global_batch // self.data_parallel
        return share - (self.micro_steps - 1) * self.training.micro_batch
