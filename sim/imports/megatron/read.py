"""Megatron-LM's arguments as a scenario.

Names and defaults: megatron-core 0.16.1 (model_parallel_config.py, distributed/distributed_data_parallel_config.py,
optimizer/optimizer_config.py, transformer/transformer_block.py) and Megatron-LM's arguments.py (recalled, as are
Megatron-DeepSpeed's additions).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError
from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args, is_config, plain, read_arguments
from sim.imports.megatron.kernels import read_kernels
from sim.imports.megatron.launches import ONE_PROCESS, amount, is_idle
from sim.imports.megatron.layout import read_layout, shards_masters
from sim.imports.megatron.model import choice, read_model
from sim.imports.megatron.muon import NAMES, read_muon
from sim.imports.settings import Said

#: --optimizer -> training.optimizer. FusedAdam decouples weight decay (adam_w_mode); sgd has --sgd-momentum 0.9.
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd-momentum", "lamb": "lamb"}
#: --fp8-recipe -> compute; what the scales of the others cost is counted as delayed or current scaling does it.
_RECIPES = {"delayed": "fp8", "tensorwise": "fp8", "mxfp8": "mxfp8", "blockwise": "fp8", "custom": "fp8"}
_DTYPES = {"fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "bf16": "bf16", "bfloat16": "bf16",
           "torch.bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "torch.float16": "fp16", "fp8": "fp8",
           "torch.uint8": "fp8", "uint8": "fp8"}


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what launch scripts, lists of arguments, YAML files or logs say together.

    Raises:
        UserError: a file that cannot be read, or a value that cannot be.
    """
    read_args(read_arguments(files, draft), draft)


def read_args(args: Args, draft: Draft) -> None:
    """Takes what arguments say together, whichever tool's files hold them. Raises UserError."""
    _hf(args, draft)
    read_model(args, draft)
    read_layout(args, draft)
    _batch(args, draft)
    _precision(args, draft)
    _optimizer(args, draft)
    _recompute(args, draft)
    if said := args.on("deepspeed"):
        draft.take("software.framework", "deepspeed", said)
    draft.assume("software.framework", "megatron", "arguments of Megatron-LM")
    read_kernels(args, draft, draft.value("training.precision") != "fp32")
    _machine(args, draft)
    _refuse_others(args)
    _close(args, draft)


def _hf(args: Args, draft: Draft) -> None:
    """A model's config.json beside the script."""
    for settings in args.settings:
        kind = settings.get("model_type", "architectures") if is_config(settings) else None
        if kind is not None:
            draft.take("model.hf", settings.file, Said(settings.file, "model_type", kind.value, kind.line))
            settings.elsewhere = True


def _batch(args: Args, draft: Draft) -> None:
    """Sequences. Without --global-batch-size a step is one micro-batch of every replica (arguments.py)."""
    pair = draft.value("model.kind") == "encoder-decoder"
    if said := args.get("seq_length", "encoder_seq_length"):
        draft.take("training.sequence", said.whole(), said)
    decoder = args.get("decoder_seq_length")
    if pair and decoder is not None:
        draft.take("training.decoder_sequence", decoder.whole(), decoder)
    if said := args.get("micro_batch_size", "batch_size"):
        draft.take("training.micro_batch", said.whole(), said)
    if said := args.get("global_batch_size"):
        draft.take("training.global_batch", said.whole(), said)
    else:
        draft.assume("training.micro_steps", 1, "without --global-batch-size: one micro-batch of every replica")


def _half(args: Args) -> tuple[str, Said | None]:
    """The 16-bit type, or fp32: --bf16, --fp16, or neither."""
    for half in ("bf16", "fp16"):
        if said := args.on(half):
            return half, said
    said = args.get("params_dtype")
    half = choice(said, _DTYPES) if said is not None else "fp32"
    return (half, said) if half in ("bf16", "fp16") else ("fp32", None)


def _precision(args: Args, draft: Draft) -> None:
    """Dtypes of everything.

    bf16 accumulates and reduces gradients in fp32 (arguments.py sets accumulate_allreduce_grads_in_fp32) unless
    --grad-reduce-in-bf16; fp16 in fp16 unless --accumulate-allreduce-grads-in-fp32. PyTorch's FSDP 2 and DeepSpeed keep
    gradients in 16 bits: neither has Megatron's gradient buffers.
    """
    half, said = _half(args)
    fp8, fp4 = args.get("fp8_format", "fp8"), args.get("fp4_format", "fp4")
    hybrid, recipe = args.on("fp8_hybrid", "fp8_e4m3"), args.get("fp8_recipe")
    whole, narrow_sum = args.on("accumulate_allreduce_grads_in_fp32"), args.on("grad_reduce_in_bf16")
    gathered = args.on("fp8_param_gather", "fp8_param")
    changes = _aware(args, draft)
    own = args.on("use_torch_fsdp2", "deepspeed")
    name = f"{'mixed' if own is not None else 'megatron'}-{half}" if half != "fp32" else "fp32"
    if (narrow := fp4 or fp8 or hybrid) is not None:
        said, name = narrow, "nvfp4" if fp4 is not None else choice(recipe, _RECIPES) if recipe is not None else "fp8"
        if recipe is not None and recipe.word() == "blockwise":
            draft.leave(recipe, "scales of blocks are counted as one of a whole tensor")
        if gathered is not None:
            changes["gather"] = name
    if shards_masters(args, draft):
        changes["gradients"] = "fp32"  # summed up in fp32, reduced in bf16 (engine.py, communication_data_type)
    if whole is not None and half == "fp16":
        changes |= {"gradients": "fp32", "reduce": "fp32"}
    if narrow_sum is not None and name != "fp32":
        changes |= {"gradients": "bf16", "reduce": "bf16"}
    if said is None:
        draft.assume("training.precision", name, "neither --bf16 nor --fp16")
    else:
        draft.take("training.precision", {"name": name, **changes} if changes else name, said)


def _aware(args: Args, draft: Draft) -> dict[str, Any]:
    """Dtypes that --use-precision-aware-optimizer changes."""
    on = args.on("use_precision_aware_optimizer")
    names = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype")
    said = {name: args.get(name) for name in names}
    if on is None:
        return {}
    dtype = {name: choice(one, _DTYPES) if one is not None else "fp32" for name, one in said.items()}
    first, second = dtype["exp_avg_dtype"], dtype["exp_avg_sq_dtype"]
    found = {"optimizer": first, "master": dtype["main_params_dtype"], "gradients": dtype["main_grads_dtype"]}
    if first != second:
        draft.leave(said["exp_avg_dtype"] or said["exp_avg_sq_dtype"] or on,
                    f"both states are counted in {first}, that of --exp-avg-dtype")
    if dtype["main_params_dtype"] == "fp32" and args.on("bf16") and not args.on("optimizer_cpu_offload"):
        # optimizer_config.py: store_param_remainders is on
        draft.leave(on, "masters are counted in fp32, of which it keeps the remainders to bf16 parameters alone")
    found = {field: one for field, one in found.items() if one != "fp32"}
    if "gradients" in found:  # arguments.py: bf16 sums are made fp32 unless --main-grads-dtype says otherwise
        found["reduce"] = found["gradients"]
    return found


def _optimizer(args: Args, draft: Draft) -> None:
    if said := args.get("optimizer"):
        if said.word() in NAMES and not args.on("deepspeed"):
            read_muon(args, draft, said)
        elif said.word() in _OPTIMIZERS:
            draft.take("training.optimizer", _OPTIMIZERS[said.word()], said)
        else:
            draft.leave(said, f"not simulated; known are {', '.join([*_OPTIMIZERS, *NAMES])}; adamw is counted")
    fraction = args.get("optimizer_offload_fraction")
    if said := args.on("optimizer_cpu_offload", "cpu_offload"):
        if fraction is not None and fraction.number() <= 0:
            return
        draft.take("parallel.offload.optimizer", "cpu", said)
        if fraction is not None and fraction.number() != 1:
            draft.take("parallel.offload.optimizer_fraction", fraction.number(), fraction)


def _recompute(args: Args, draft: Draft) -> None:
    """Activation recomputation.

    transformer_block.py, _checkpointed_forward: "uniform" runs every block again, keeping the input of each so-many-th;
    "block" runs the first so many of each model chunk again, where a pipeline rank has several chunks of each.
    """
    path, kind = "training.recompute", args.get("recompute_granularity")
    method = args.get("recompute_method", "activations_checkpoint_method")
    number = args.get("recompute_num_layers", "checkpoint_num_layers", "activations_checkpoint_num_layers")
    modules = args.get("recompute_modules")
    old = args.on("checkpoint_activations", "deepspeed_activation_checkpointing")
    short = args.on("recompute_activations")
    kept = args.on("checkpoint_in_cpu")  # Megatron-DeepSpeed: what blocks start from waits in host memory
    if kept is not None and (old is not None or kind is not None):
        draft.take("parallel.offload.activations", "cpu", kept)
    if kind is None or str(kind.value) in ("", "None"):
        if old is not None:
            draft.take(path, "full", old)
        elif short is not None:
            draft.take(path, "selective", short)
        return
    if choice(kind, {"full": True, "selective": False}):
        how = choice(method, {"uniform": "uniform", "block": "block"}) if method is not None else "uniform"
        if how == "block":
            _some_blocks(draft, method or kind, number)
            return
        draft.take(path, "full", kind)
        if number is not None and number.whole() > 1:
            draft.leave(number, f"the input of every block is kept, not of one in {number.whole()}")
        return
    names = _names(modules) if modules is not None else ["core_attn"]
    draft.take(path, "selective" if names == ["core_attn"] else {"modules": names}, kind)


def _some_blocks(draft: Draft, method: Said, number: Said | None) -> None:
    if number is None:
        raise method.wrong("--recompute-num-layers beside it")
    chunks, layers = draft.value("parallel.virtual_stages") or 1, draft.value("model.layers")
    again = number.whole(0) * chunks
    draft.take("training.recompute", {"layers": again if layers is None else min(again, layers)}, number,
               "of each pipeline rank" + (f", {chunks} chunks together" if chunks > 1 else ""))


def _names(said: Said) -> list[str]:
    """Words of an argument that takes several. Raises UserError."""
    values = said.value if isinstance(said.value, list) else str(said.value).replace(",", " ").split()
    if not values or not all(isinstance(one, str) for one in values):
        raise said.wrong("names of modules")
    return [str(one) for one in values]


def _machine(args: Args, draft: Draft) -> None:
    """How many GPUs: the launcher's arguments, Slurm's, or those a run logged.

    A task of Slurm is a GPU only where the task is not a launcher that starts a process a GPU.
    """
    per_node = _first_known(args, "nproc_per_node", "#SBATCH --gpus-per-node", "#SBATCH --gres", "gpus_per_node",
                            "gres", "num_gpus")
    tasks = _first_known(args, "#SBATCH --ntasks-per-node", "ntasks_per_node")
    size = _first_known(args, "world_size", "#SBATCH --gpus", "gpus")
    every = _first_known(args, "#SBATCH --ntasks", "ntasks")
    if args.get("nproc_per_node") is None and per_node is None:
        per_node, size = tasks, size or (every if tasks is None else None)
    nodes = _first_known(args, "nnodes", "#SBATCH --nodes", "num_nodes", "nodes")
    single = args.get(plain(ONE_PROCESS))
    ranks = [draft.value(f"parallel.{name}") or 1 for name in ("tensor", "pipeline", "context", "expert")]
    if single is not None and ranks == [1, 1, 1, 1] and size is None:
        per_node, nodes = single, nodes if args.get("nnodes") is not None else single
    if nodes is not None:
        draft.nodes = nodes
    if per_node is not None:
        draft.per_node = per_node
    if size is not None and (nodes is None or per_node is None):
        draft.gpus = size


def _first_known(args: Args, *names: str) -> Said | None:
    """The first of these that says a whole number (`gpu:8` too); others wait for a running shell."""
    found = None
    for name in names:
        said = args.get(name)
        if said is None or found is not None:
            continue
        # `srun --nodes 2 python`: what follows a launcher's option may be its command
        count = amount(said.value[0] if isinstance(said.value, list) and said.value else said.value)
        if count and int(count) > 0:
            found = Said(said.file, said.name, int(count), said.line)
    return found


def _refuse_others(args: Args) -> None:
    """A file without a single argument of Megatron-LM is of another tool. Raises UserError."""
    known = table("imports/megatron/names.yaml")
    for settings in args.settings:
        names = [plain(key) for key in settings.data]
        titan = any(key.startswith(("parallelism.", "job.")) or key == "model.flavor" for key in settings.data)
        telling = any(name in known["fields"] or name in known["left"] or is_idle(name) for name in names)
        if not settings.elsewhere and ((titan and "num_layers" not in names) or (
                not telling and next(settings.read(), None) is None)):
            raise UserError(Fault("holds no argument of Megatron-LM such as num_layers", "", settings.file, 0,
                                  f"drystep import torchtitan {settings.file}" if titan else
                                  "give a launch script, its arguments, or a YAML file of them"))


def _close(args: Args, draft: Draft) -> None:
    """What no field took."""
    known = table("imports/megatron/names.yaml")
    for name in known["documents"]:
        if (said := args.get(name)) is not None and not _says_nothing(said):
            draft.packs(said)
    for name in args.names():
        why = next((text for one, text in known["left"].items() if fnmatch.fnmatchcase(name, one)), None)
        if why is None:
            continue
        said = args.get(name)
        if said is not None and not _says_nothing(said):
            draft.leave(said, why)
    for settings in args.settings:
        for key, value in settings.data.items():
            name = plain(key)
            if name.startswith(("#", "no_wandb")) or value is False or is_idle(name):
                settings.idle(key.replace("[", "[[]"))
        draft.close(settings)


def _says_nothing(said: Said) -> bool:
    """Whether an argument stands at what it is without being given, as a log lists it."""
    try:
        return not said.flag()
    except UserError:
        return said.value in ([], "none", "native", "None")
