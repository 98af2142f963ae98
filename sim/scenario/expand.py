"""Replaces names by what they stand for, before the fields are checked: topology, preset, Hugging Face config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from sim.errors import Fault, UserError, nearest
from sim.scenario.fields.cluster import GpuFigures
from sim.scenario.named.gpus import canonical_gpu, gpu_names, is_profile, resembled
from sim.scenario.named.hub import preset_of
from sim.scenario.named.presets import preset, preset_names
from sim.scenario.named.profile import PLACE, check_profile
from sim.scenario.named.topologies import find_topology
from sim.scenario.text.document import Document, beside, read_document
from sim.scenario.text.other_names import other_value

#: Where presets keep their tables of layers.
_PRESET_FOLDER = Path(__file__).parent / "named"


def _near_model(name: str) -> str:
    """A hint at the model that a name, or its last part on Hugging Face's Hub, is close to."""
    if known := preset_of(name):
        return f"did you mean '{known}'?"
    whose, _, tail = name.rpartition("/")
    near = nearest(name, preset_names()) or nearest(tail, preset_names())
    of_hub = "any other model: hf: the path of its config.json, in place of preset" if whose else ""
    return "; ".join(part for part in (near, of_hub) if part)


def expand(document: Document, faults: list[Fault]) -> dict[str, Any]:
    """The document's data with names replaced; faults of the names are added to `faults`.

    A part that cannot be expanded is left out of the result together with its fault, so it is not reported twice.
    """
    data: dict[str, Any] = _without_nulls(document.data)
    cluster, model = data.get("cluster"), data.get("model")
    if isinstance(cluster, dict):
        data["cluster"] = cluster = dict(cluster)
        _topology(cluster, document, faults)
    if isinstance(model, dict):
        known = _undone(_model(model, document, faults), document.data["model"])
        data["model"] = model = _table(known, document, faults)
        training = data.get("training")
        if model.get("kind") == "layers" and isinstance(training, dict):  # a table counts samples, not tokens
            data["training"] = {"sequence": 1, **training}
    if isinstance(training := data.get("training"), dict):
        data["training"] = _request(training, model.get("kind") if isinstance(model, dict) else None)
    return data


def _request(training: dict[str, Any], kind: object) -> dict[str, Any]:
    """A request says its own sizes: batch and sequence of a training step need not be given beside them; nor what an
    encoder generates, which is nothing. An encoder-decoder's sequences are one of each stack."""
    mode = training.get("mode")
    if not isinstance(mode, dict) or not isinstance(run := mode.get("inference"), dict):
        return training
    if kind == "encoder":
        run = {"generate": 0, **run}
        training = {**training, "mode": {**mode, "inference": run}}
    prompt, generate = run.get("prompt"), run.get("generate")
    steps = {} if "global_batch" in training else {"micro_steps": 1}
    sizes = {}
    if _count(prompt) and prompt > 0 and _count(generate):
        sizes = {"sequence": prompt + generate}
        if kind == "encoder-decoder" and generate:
            sizes = {"sequence": prompt, "decoder_sequence": generate}
    return {"micro_batch": 1, **steps, **sizes, **training}


def _count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _table(model: dict[str, Any], document: Document, faults: list[Fault]) -> dict[str, Any]:
    """The model with the path of its table of layers made absolute, and its rows counted."""
    written = model.get("table")
    if not isinstance(written, str) or model.get("kind") != "layers":
        return model
    from sim.scenario.named.layer_table import read_table

    asked = document.data.get("model")
    own = isinstance(asked, dict) and "table" in asked
    path = beside(document.folder, written) if own else _PRESET_FOLDER / written
    try:
        rows = read_table(path, written)
    except UserError as error:
        faults += _told("model.table", error, document)
        return {**model, "layers": 1}
    return {**model, "table": str(path.resolve()), "layers": len(rows)}


#: Fields without which there is no model: null leaves them out as anywhere.
_SIZES = ("kind", "layers", "hidden", "heads", "vocab")


def _over(known: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """A known architecture with the user's fields put over it; inside `moe` and `mla` field by field."""
    nested = {
        name: {**known[name], **written[name]}
        for name in ("moe", "mla")
        if isinstance(known.get(name), dict) and isinstance(written.get(name), dict)
    }
    return {**known, **{name: value for name, value in written.items() if value is not None}, **nested}


def _undone(known: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """An architecture without the fields that are written as null: what a preset or config says of them is undone, but
    for sizes that every model has."""
    return {name: value for name, value in known.items() if name in _SIZES or written.get(name, value) is not None}


def _told(path: str, error: UserError, document: Document) -> list[Fault]:
    """Faults of a file that a field names: those of its contents as they are, those of the file itself at the field."""
    file, line = document.place(path)
    return [
        f if f.line or f.field else Fault(f"'{f.file}': {f.message}" if f.file else f.message, path, file, line, f.hint)
        for f in error.faults
    ]


def _without_nulls(value: Any) -> Any:
    """A field with no value is a field left out."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _topology(cluster: dict[str, Any], document: Document, faults: list[Fault]) -> None:
    topology = cluster.get("topology")
    folder = document.folder
    if isinstance(topology, str):
        try:
            found = find_topology(topology, document.folder)
        except UserError as error:
            faults += _told("cluster.topology", error, document)
            cluster["topology"] = dict(_STANDIN)
            return
        faults += found.faults
        for path, place in found.places.items():
            document.places[f"cluster.topology.{path}" if path else "cluster.topology"] = place
        topology, folder = _without_nulls(found.data), found.folder
    if isinstance(topology, dict):
        cluster["topology"] = topology = dict(topology)
        _gpu(cluster, topology, document, folder, faults)


#: Takes the place of a topology that was not found, so that only that is reported.
_STANDIN = {"name": "unknown", "gpu": "a100-80g-sxm", "gpus_per_node": 8, "intra": {"kind": "nvswitch"}}


def _gpu(cluster: dict[str, Any], topology: dict[str, Any], document: Document, folder: Path,
         faults: list[Fault]) -> None:
    """Replaces the topology's GPU by the catalogue's name, or by the mapping of a profile; `folder` holds its file."""
    gpu = topology.get("gpu")
    if isinstance(gpu, str) and is_profile(gpu):
        try:
            found = read_document(beside(folder, gpu), gpu, "gpu")
        except UserError as error:
            faults += _told(PLACE, error, document)
            topology["gpu"] = _STANDIN["gpu"]
            return
        faults += found.faults
        for path, place in found.places.items():
            document.places[f"{PLACE}.{path}" if path else PLACE] = place
        gpu = _without_nulls(found.data)
    if isinstance(gpu, dict):
        topology["gpu"] = _described(gpu, cluster, document, faults)
    elif isinstance(gpu, str):
        name = canonical_gpu(gpu)
        if name is None:
            hint = nearest(gpu, gpu_names()) or "see 'drystep list gpus'"
            faults.append(document.fault(PLACE, f"there is no GPU named '{gpu[:80]}' in the catalogue", hint))
            name = str(_STANDIN["gpu"])
        topology["gpu"] = name


#: Figures of a GPU under two names: of a scenario, and of the catalogue and profiles.
_ALIKE = {"memory": "memory_gib", "memory_bandwidth": "memory_bandwidth_gb_s"}


def _described(gpu: dict[str, Any], cluster: dict[str, Any], document: Document, faults: list[Fault]) -> Any:
    """The GPU behind a mapping; its single figures go to `cluster.gpu`, where what the user wrote wins."""
    own = {key: value for key, value in gpu.items() if key in GpuFigures.model_fields}
    if own:
        written = cluster.get("gpu")
        cluster["gpu"] = {**own, **written} if isinstance(written, dict) else own
        for key in own:
            document.places.setdefault(f"cluster.gpu.{key}", document.place(f"{PLACE}.{key}"))
            if not isinstance(written, dict) or key not in written:
                document.moved[f"cluster.gpu.{key}"] = f"{PLACE}.{key}"
    faults += [document.fault(f"{PLACE}.{other}", f"'{name}' and '{other}' are one figure, said twice", "keep one of "
                              "the two") for name, other in _ALIKE.items() if name in gpu and other in gpu]
    rest = {key: value for key, value in gpu.items() if key not in own}
    if "like" not in rest and canonical_gpu(str(rest.get("name"))) is not None:
        rest["like"] = rest["name"]
    if "like" not in rest and (nearest_card := resembled(own)) is not None:
        rest = {"confidence": "low", **rest, "like": nearest_card}
    checked = check_profile(rest, document, PLACE, faults)
    if checked is None:
        return _STANDIN["gpu"]
    return checked if set(checked) - {"like", "name"} else checked["like"]


def _model(model: dict[str, Any], document: Document, faults: list[Fault]) -> dict[str, Any]:
    name, config = model.get("preset"), model.get("hf")
    if name is not None and config is not None:
        faults.append(document.fault("model.hf", "'preset' and 'hf' both name an architecture", "keep one of the two"))
        return model
    if isinstance(name, str):
        fields = preset(name)
        if fields is None:
            hint = other_value("model.preset", name) or _near_model(name) or (
                "see 'drystep list models', or give hf: the path of its config.json, in place of preset")
            faults.append(document.fault("model.preset", f"there is no model named '{name[:80]}'", hint))
            return model
        return _over(fields, model)
    if isinstance(config, str):
        from sim.scenario.hf.families import read_config

        try:
            return _over(read_config(document.folder, config), model)
        except UserError as error:
            faults += _told("model.hf", error, document)
    return model
