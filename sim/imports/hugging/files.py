"""Files of a Hugging Face or DeepSpeed job, in any mix: told by what they hold, read, then settled together.

Each part has its reader (`trainer`, `accelerate`, `fsdp`, `deepspeed`, `adapters`, `optimizers`); what follows from
several files is settled here and in `policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sim.errors import Fault, UserError
from sim.imports.draft import Draft, Ranks
from sim.imports.hugging import axolotl, llamafactory
from sim.imports.hugging.accelerate import read_accelerate_yaml, settle_launched
from sim.imports.hugging.adapters import read_adapter, read_quantised
from sim.imports.hugging.axolotl import read_axolotl_yaml
from sim.imports.hugging.deepspeed import MARKS as ZERO_MARKS
from sim.imports.hugging.deepspeed import read_deepspeed_json, settle_zero
from sim.imports.hugging.facts import AUTO, Job
from sim.imports.hugging.fsdp import settle_fsdp
from sim.imports.hugging.llamafactory import read_llamafactory
from sim.imports.hugging.optimizers import settle_optimizer
from sim.imports.hugging.policy import settle_precision
from sim.imports.hugging.trainer import MARKS, read_arguments, settle_arguments
from sim.imports.settings import Said, Settings, peek, read_settings
from sim.scenario.fields.precisions import PRECISIONS
from sim.scenario.named.hub import preset_of
from sim.scenario.named.presets import preset

Reader = Callable[[Settings, Job], None]

_KNOWN = ("a model's config.json, the Trainer's arguments, axolotl's or LLaMA-Factory's, DeepSpeed's JSON, "
          "accelerate's YAML or adapter_config.json")

_ADAPTER_MARKS = ("peft_type",)
_LAUNCH_MARKS = ("distributed_type", "compute_environment", "num_machines", "num_processes")
_MODEL_MARKS = ("model_type", "architectures")
#: Ends of launch scripts' names.
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".py")
#: model_type of what transformers has no scaled_dot_product_attention for (`_supports_sdpa`, 5.24.0).
_WITHOUT_SDPA = ("bloom", "mpt", "gemma2", "gpt_oss")
#: Who splits the job -> the stack that runs it.
_STACKS = {"plain": "pytorch", "fsdp": "pytorch", "zero": "deepspeed", "core": "megatron"}
_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_MIB = 1 << 20


#: Tools that have names of their own for the Trainer's arguments.
_WORDS: dict[Reader, str] = {read_axolotl_yaml: "axolotl's YAML", read_llamafactory: "LLaMA-Factory's arguments"}
_VIEWS: dict[Reader, Callable[[Settings], Settings]] = {
    read_axolotl_yaml: axolotl.view, read_llamafactory: llamafactory.view}


def read_hf(files: Sequence[str], draft: Draft) -> None:
    """Files of a job of the Trainer's. Raises UserError."""
    _read(files, Job(draft, hugging=True))


def read_accelerate(files: Sequence[str], draft: Draft) -> None:
    """Files of a job that accelerate launches. Raises UserError."""
    _read(files, Job(draft, hugging=True))


def read_deepspeed(files: Sequence[str], draft: Draft) -> None:
    """Files of a job that DeepSpeed runs, Hugging Face's model or not. Raises UserError."""
    _read(files, Job(draft))


def read_axolotl(files: Sequence[str], draft: Draft) -> None:
    """axolotl's YAML, and files that it names. Raises UserError."""
    _read(files, Job(draft, hugging=True), read_axolotl_yaml)


def read_factory(files: Sequence[str], draft: Draft) -> None:
    """LLaMA-Factory's YAML or JSON, and files that it names. Raises UserError."""
    _read(files, Job(draft, hugging=True), read_llamafactory)


def _read(files: Sequence[str], job: Job, own: Reader | None = None) -> None:
    """Reads and settles everything; `own` is the reader of what must be among the files, whatever else is."""
    found = [_recognised(file, own) for file in files]
    if own is not None and not any(kind is own for kind, _ in found):
        raise UserError(Fault(f"is {_kind(found[0][1])[0]}, and none of the files is {_WORDS[own]}", "", files[0], 1,
                              "'drystep import hf' reads the others by themselves"))
    job.zeros = [settings for kind, settings in found if kind is read_deepspeed_json]
    for reader in (_config, read_axolotl_yaml, read_llamafactory, read_arguments, read_deepspeed_json,
                   read_accelerate_yaml, read_adapter):
        for kind, settings in found:
            if kind is reader:
                job.files.append(settings)
                reader(settings, job)
    _model(job)
    settle_arguments(job, _STACKS[job.engine])
    settle_launched(job)
    _stack(job)
    settle_optimizer(job)
    settle_precision(job)
    _bucket(job)
    _batch(job)
    for settings in job.files:
        job.draft.close(settings)


def _recognised(file: str, own: Reader | None) -> tuple[Reader, Settings]:
    """Which reader a file is for, by what it holds; a folder stands for the config.json in it."""
    path = Path(file).expanduser()
    try:
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False
    if folder:
        return _config, read_settings(f"{file.rstrip('/')}/config.json")
    if path.suffix in _SCRIPTS:
        raise UserError(Fault("is a script, not a file of settings", file=file, hint="give the JSON or YAML files that "
                              "it names; 'drystep import megatron' reads scripts that launch Megatron-LM"))
    settings = read_settings(file)
    reader = _kind(settings)[1]
    if own is not None and reader in (None, read_arguments, read_axolotl_yaml, read_llamafactory):
        reader = own
    if reader is None:
        names = ", ".join(map(str, list(settings.data)[:5]))
        hint = "'drystep import torchtitan' reads torchtitan's TOML" if path.suffix == ".toml" else ""
        raise UserError(Fault(f"expected {_KNOWN}, found {names[:60]!r}", file=file, line=1, hint=hint))
    return reader, _VIEWS[reader](settings) if reader in _VIEWS else settings


def kind_of(settings: Settings) -> str:
    """Which of this job's files these settings look like, "" for none."""
    return _kind(settings)[0]


def _kind(settings: Settings) -> tuple[str, Reader | None]:
    kinds: tuple[tuple[str, tuple[str, ...], Reader], ...] = (
        ("an adapter_config.json", _ADAPTER_MARKS, read_adapter),
        ("accelerate's YAML", _LAUNCH_MARKS, read_accelerate_yaml),
        ("DeepSpeed's JSON", ZERO_MARKS, read_deepspeed_json),
        (_WORDS[read_axolotl_yaml], axolotl.MARKS, read_axolotl_yaml),
        (_WORDS[read_llamafactory], llamafactory.MARKS, read_llamafactory),
        ("a model's config.json", _MODEL_MARKS, _config),
        ("the Trainer's arguments", MARKS, read_arguments))
    if all(isinstance(key, str) for key in settings.data):
        for words, marks, reader in kinds:
            if any(settings.has(mark) for mark in marks) and not _arguments(settings, reader):
                return words, reader
    return "", None


def _arguments(settings: Settings, reader: Reader) -> bool:
    """Whether what looks like a model or a DeepSpeed file is one of arguments after all (run_clm.py's model_type)."""
    return reader is _config and not settings.has("architectures") and settings.has("output_dir")


def _config(settings: Settings, job: Job) -> None:
    """A model's config.json: sizes are read by `sim.scenario.hf.families`, what it says of dtypes here."""
    written = settings.file
    job.draft.take("model.hf", written, peek(settings, *_MODEL_MARKS) or Said(written, "", None))
    job.config, job.hugging = settings, True
    read_quantised(settings, job, "quantization_config.")
    settings.elsewhere = True


def _model(job: Job) -> None:
    """The model that arguments name, where no config.json is given: a local folder, or a name that is a preset's."""
    said = peek(job.arguments, "model_name_or_path") if job.arguments is not None else None
    if said is None or job.arguments is None:
        return
    if job.draft.has("model"):
        job.arguments.idle("model_name_or_path")
        return
    said = job.arguments.get("model_name_or_path") or said
    if not isinstance(said.value, str):
        raise said.wrong("a model's name or path")
    if _holds_config(said.value):
        job.draft.take("model.hf", said.value, said)
    elif (known := preset_of(said.value)) is not None:
        job.draft.take("model.preset", known, said, "by its name; its config.json says more")
    else:
        job.draft.leave(said, "its config.json is not here: give that file too")


def _holds_config(path: str) -> bool:
    try:
        return (Path(path).expanduser() / "config.json").is_file()
    except (OSError, ValueError):
        return False


def _stack(job: Job) -> None:
    """Framework, modules, strategy."""
    draft, engine = job.draft, job.engine
    said = job.said("engine")
    if said is not None:
        draft.take("software.framework", _STACKS[engine], said)
    else:
        draft.assume("software.framework", _STACKS[engine], "no engine is named")
    if engine == "core":
        draft.assume("software.modules", "megatron", "accelerate builds Megatron-LM's model")
    elif job.hugging:
        draft.assume("software.modules", "transformers", "Hugging Face's files")
        spelled = peek(job.config, "model_type") if job.config is not None else None
        if spelled is not None and spelled.value in _WITHOUT_SDPA:
            draft.assume("training.attention", "eager", f"transformers has no sdpa for {spelled.value}")
        else:
            draft.assume("training.attention", "sdpa", "transformers' default")
    if engine == "fsdp":
        settle_fsdp(job)
    elif engine == "zero":
        settle_zero(job)
    elif job.said("replicas") is not None and not draft.has("parallel.strategy") and engine == "plain":
        _replicated(job)


def _replicated(job: Job) -> None:
    """DDP, unless a single process is launched."""
    said = job.said("replicas")
    if said is not None and (job.draft.gpus is None or job.draft.gpus.whole() > 1):
        job.draft.take("parallel.strategy", "ddp", said)


def _bucket(job: Job) -> None:
    """DeepSpeed counts a bucket in elements of the module's dtype; "auto" is the square of the width."""
    if job.engine != "zero":
        return
    said, size = job.said("bucket"), job.of("bucket")
    auto = job.said(f"auto {_BUCKET}")
    if said is None and auto is not None and (width := _width(job)):
        said, size = Said(auto.file, auto.name, AUTO, auto.line), width ** 2
    precision = job.draft.value("training.precision")
    row = PRECISIONS.get(precision, {}) if isinstance(precision, str) else precision
    if said is not None and isinstance(row, Mapping) and not job.draft.has("parallel.bucket_mb"):
        mib = size * _BYTES.get(row.get("parameters", ""), 4) / _MIB
        job.draft.take("parallel.bucket_mb", round(mib, 3), said, f"{size:,.0f} elements")


def _width(job: Job) -> int | None:
    """Elements of a token between blocks, by config.json or the preset."""
    if job.config is None:
        fields = preset(str(job.draft.value("model.preset"))) or {}
        return fields.get("hidden")
    width = peek(job.config, "hidden_size", "n_embd", "d_model", "text_config.hidden_size")
    return width.whole() if width is not None else None


_BUCKET = "zero_optimization.reduce_bucket_size"


def _batch(job: Job) -> None:
    """Micro-batch and micro-steps, or the whole batch; DeepSpeed's three numbers have to agree."""
    draft = job.draft
    micro, steps, total = (job.facts.get(name) for name in ("micro", "steps", "total"))
    if total is not None:
        whole, said = total
        if micro is not None and steps is not None:
            _agree(job, whole, micro[0] * steps[0], said)
        elif micro is None:
            turns = steps[0] if steps is not None else 1
            draft.take_later("training.micro_batch", lambda ranks: _share(ranks, whole, turns, said), said,
                             "over replicas" + (f" and {turns} micro-steps" if turns > 1 else ""))
        draft.take("training.global_batch", whole, said)
    elif steps is not None:
        draft.take("training.micro_steps", steps[0], steps[1])
    elif "default steps" in job.facts:
        draft.assume("training.micro_steps", job.of("default steps"), "default of gradient_accumulation_steps")
    else:
        draft.assume("training.micro_steps", 1, "no accumulation is said")
    if micro is not None:
        draft.take("training.micro_batch", micro[0], micro[1])
    elif "default micro" in job.facts:
        draft.assume("training.micro_batch", job.of("default micro"),
                     "the Trainer's default of per_device_train_batch_size")


def _share(ranks: Ranks, whole: int, turns: int, said: Said) -> int:
    """What of the whole batch one replica takes at once (config.py, _set_batch_related_parameters; what does not
    divide its _batch_assertion refuses)."""
    replicas = max(1, ranks.gpus // (ranks.tensor * ranks.pipeline * ranks.context))
    each, rest = divmod(whole, replicas * turns)
    if rest or not each:
        raise said.wrong(f"a multiple of {replicas * turns}, {replicas} replicas times {turns} micro-steps")
    return each


def _agree(job: Job, whole: int, each: int, said: Said) -> None:
    """Holds a whole batch against what each replica takes; they tell the GPUs where no file does."""
    gpus, degrees = job.draft.gpus, 1
    for name in ("tensor", "pipeline", "context"):
        degrees *= job.draft.value(f"parallel.{name}") or 1
    ranks = max(1, gpus.whole() // degrees) if gpus is not None else None
    if whole % each or (ranks is not None and whole != each * ranks):
        over = f" times {ranks} replicas" if ranks is not None else ""
        raise UserError(Fault(f"says {whole}, but micro-batch times micro-steps is {each}{over}", said.name, said.file,
                              said.line, "DeepSpeed refuses it: leave one of the three out"))
    if gpus is None:
        job.draft.gpus = Said(said.file, said.name, whole // each * degrees, said.line)
