"""From pydantic's errors to sentences a person can act on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sim.errors import Fault, nearest
from sim.scenario.text.document import Document, describe
from sim.scenario.text.other_names import other_field, other_value

#: Dtypes of weights alone, which are no precision of a whole run.
_WEIGHTS = ("int8", "int4")
#: Powers of 1,000 or 1,024 that letters behind a number stand for.
_POWERS = {"K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
#: A field that takes fewer whole numbers than this has them listed.
_FEW_NUMBERS = 10
_QUOTED = re.compile(r"'([^']*)'")
_TAGS = frozenset({"name", "table", "modules"})
#: Fields that take a name or a table, and how the table is written.
_OR_TABLE = {"recompute": "or {layers: 4}, or {modules: [core_attn]}",
             "mode": "or {inference: {prompt: 512, generate: 128, batch: 8}}",
             "document": "or {mean: 500, spread: 1.0}"}
#: Tables in whose place a word stands that another field takes, and how.
_ELSEWHERE = {"cluster.gpu": "single figures such as memory stand here; another GPU: --set cluster.topology.gpu=h200"}
#: Fields that take a list or one of some words.
_OR_WORDS = {"targets": ("all", "all-linear")}


def explain(error: ValidationError, root: type[BaseModel], document: Document, inside: str = "") -> list[Fault]:
    """One fault for each of pydantic's errors, with the place where the user wrote the field.

    With `inside`, only errors of that dotted path or below count, and the path itself may be missing its neighbours.
    """
    faults: dict[str, Fault] = {}
    missing: set[str] = set()
    meant: set[str] = set()
    for item in error.errors(include_url=False, include_context=True):
        path, model = _path(item["loc"], root)
        if inside and path != inside and not path.startswith(inside + "."):
            continue
        if item["type"] == "extra_forbidden":
            message, hint = _unknown_field(str(item["loc"][-1]), path, model)
        else:
            message, hint = _sentence(item["type"], item.get("ctx", {}), item["input"], item["msg"], path, model)
        faults.setdefault(path, document.fault(path, message, hint))
        if item["type"] == "missing":
            missing.add(path)
        elif item["type"] == "extra_forbidden" and (name := _QUOTED.search(hint)):
            meant.add(".".join([*path.split(".")[:-1], name[1]]))
    return [fault for path, fault in faults.items() if path not in missing & meant]


def tables_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The tables an annotation can hold, looked up inside Annotated, unions and optionals."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) not in (list, dict):
        for part in get_args(annotation):
            yield from tables_of(part)


def _tables_of_items(annotation: Any) -> Iterator[type[BaseModel]]:
    """The tables a list, looked up in the same places, can hold."""
    for part in get_args(annotation):
        yield from tables_of(part) if get_origin(annotation) is list else _tables_of_items(part)


def field_table(root: type[BaseModel], parts: list[str]) -> tuple[type[BaseModel] | None, int]:
    """The table that holds the last part of a path, and how many parts were known before it ended."""
    model: type[BaseModel] | None = root
    for depth, part in enumerate(parts):
        if model is None or part not in model.model_fields:
            return model, depth
        if depth == len(parts) - 1:
            return model, len(parts)
        model = next(tables_of(model.model_fields[part].annotation), None)
    return model, len(parts)


def _path(location: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """Dotted path without pydantic's union tags, and the table that holds its last part."""
    parts: list[str] = []
    model: type[BaseModel] | None = root
    holder: type[BaseModel] | None = root
    items: type[BaseModel] | None = None  # what a list holds, until its entry is entered
    tagged = False
    for part in location:
        if tagged and part in _TAGS:
            tagged = False
            continue
        tagged = False
        parts.append(str(part).removesuffix("[key]") if part != "[key]" else "")
        holder = model or items
        field = holder.model_fields.get(str(part)) if holder and not isinstance(part, int) else None
        model = next(tables_of(field.annotation), None) if field else None
        items = next(_tables_of_items(field.annotation), None) if field else items if isinstance(part, int) else None
        tagged = field is not None and str(part) in _OR_TABLE
    return ".".join(p for p in parts if p), holder


def _sentence(
    kind: str, ctx: dict[str, Any], value: Any, message: str, path: str, model: type[BaseModel] | None
) -> tuple[str, str]:
    name = path.rpartition(".")[2]
    if kind == "missing":
        return _missing(name, model)
    if kind == "literal_error":
        allowed = _QUOTED.findall(ctx["expected"]) or re.findall(r"\d+", ctx["expected"])
        message, hint = _not_allowed(path, value, allowed)
        return message, hint or _swept(path, value) or _OR_TABLE.get(name, "")
    if kind == "choice":
        said, hint = _not_allowed(path, ctx["value"], ctx["allowed"].split(","))
        return said, f"write {{name: pure-bf16, parameters: {value}}}" if value in _WEIGHTS else hint
    if kind == "word":
        word = ctx["word"]
        hint = (nearest(value, [word]) or _number_hint(value)) if isinstance(value, str) else ""
        return f"expected '{word}' or {ctx['or']}, not {describe(value)}", hint
    if kind == "list_type" and isinstance(value, str) and (words := _OR_WORDS.get(name)):
        hint = nearest(value, words) or other_value(path, value)
        return f"expected a list, {' or '.join(words)}, not {describe(value)}", hint
    if kind == "unit":
        return message, f"write {ctx['examples']}"
    if kind == "plain":
        return f"{message}, not {describe(value)}", ""
    if kind == "range":
        return _range(value, ctx["low"], ctx["high"])
    if kind in ("model_type", "model_attributes_type") and (
            hint := (_ELSEWHERE.get(path, "") if isinstance(value, str) else "") or _table_with(value, name, model)):
        return f"expected a mapping of fields, not {describe(value)}", hint
    if kind == "dict_type" and name == "tflops" and isinstance(value, int | float):
        return f"expected figures by dtype, not {describe(value)}", f"write {{bf16: {value}}}"
    for test in (_wrong_type, _out_of_range):
        found = test(kind, ctx, value)
        if found:
            return found[0], found[1] or _swept(path, value) or _few_numbers(kind, name, model)
    return f"{describe(value)} cannot be used here", ""


def _swept(path: str, values: Any) -> str:
    """How a field is given several values, where that is what `values` is for one that takes one."""
    if not isinstance(values, list) or not all(isinstance(one, str | int | float) for one in values) or not values:
        return ""
    if any(part.isdigit() for part in path.split(".")) or path.startswith("sweep"):
        return ""
    said = [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
    return f"write {said[0]}" if len(said) == 1 else f"to run each, 'sweep: {{{path}: [{', '.join(said)}]}}'"


#: Tables that a word in their place most likely names, by the field that takes such a name.
_NAMED = {"model": "preset", "cluster": "topology", "finetune": "method"}


def _table_with(value: Any, name: str, model: type[BaseModel] | None) -> str:
    """How the table of field `name` is written where `value`, a word in its place, is one that a field of it takes."""
    field = model.model_fields.get(name) if model is not None and isinstance(value, str) else None
    inner = next(tables_of(field.annotation), None) if field is not None else None
    fields = inner.model_fields.items() if inner is not None else ()
    if inner is not None and name in _NAMED and value and " " not in value:
        key = "hf" if name == "model" and value.endswith(".json") else _NAMED[name]
        return f"write {{{key}: {value}}}"
    return next((f"write {{{key}: {value}}}" for key, one in fields
                 if get_origin(one.annotation) is Literal and value in get_args(one.annotation)), "")


def _missing(name: str, model: type[BaseModel] | None) -> tuple[str, str]:
    field = model.model_fields.get(name) if model else None
    meaning = f": {field.description}" if field is not None and field.description else ""
    return f"'{name}' is required{meaning}", f"add '{name}: …'"


def _unknown_field(name: str, path: str, model: type[BaseModel] | None) -> tuple[str, str]:
    known = list(model.model_fields) if model else []
    message = f"there is no field '{name[:60]}' here"
    if "." in name:
        head, _, rest = name.partition(".")
        return message, f"dotted fields are for sweep and --set: write '{head}:' and '{rest}: …' below it"
    meant = other_field(name, path.rpartition(".")[0])
    if not meant and (elsewhere := _elsewhere(name)):
        meant = f"did you mean '{elsewhere}'?"
    return message, meant or nearest(name, known) or f"known here: {', '.join(known)}"


def _elsewhere(name: str) -> str:
    """The dotted path of a field of that name in another table."""
    from sim.scenario.fields.schema import Scenario

    for table_name, field in Scenario.model_fields.items():
        for model in tables_of(field.annotation):
            if name in model.model_fields:
                return f"{table_name}.{name}"
    return ""


def _not_allowed(path: str, value: Any, allowed: list[str]) -> tuple[str, str]:
    shown = ", ".join(allowed)
    several = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
    if len(several) > 1 and set(several) <= set(allowed) and (swept := _swept(path, several)):
        return f"{describe(value)} is not one of {shown}", f"{swept}; drystep compare takes a --set for each"
    of_list = re.sub(r"\.\d+\Z", "", path)
    hint = other_value(of_list, str(value).lower()) if isinstance(value, (str, bool)) else ""
    if not hint and isinstance(value, str):
        hint = nearest(value, allowed)
    return f"{describe(value)} is not one of {shown}", hint


def _number_hint(value: Any, whole: bool = False) -> str:
    """How a number that was written as text is written, e.g. 128k, 1T or $2."""
    if not isinstance(value, str):
        return ""
    several = re.fullmatch(r"\d+(?:\.\d+)?(?: *, *\d+(?:\.\d+)?)+", value.strip())
    if several is not None and not re.fullmatch(r"\d{1,3}(?:,\d{3})+", value.strip()):
        return f"to run each, a sweep with the list [{value.strip()}]"
    ratio = re.fullmatch(r"(\d+(?:\.\d+)?) ?: ?1", value.strip())
    if ratio is not None:
        return f"write {ratio[1]}"
    bare = value.replace("_", "").replace(",", "").strip()
    if re.fullmatch(r"[-+]?\d+(\.\d*)?", bare):
        return f"write {bare} without quotes, commas or underscores"
    short = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([kKMGBT])i?", bare)
    if short is not None:
        number, power = float(short[1]), _POWERS[short[2].upper()]
        if not whole:
            return f"write {number * 1000.0**power:g}"
        decimal, binary = round(number * 1000**power), round(number * 1024**power)
        return f"write {decimal} or, in powers of two, {binary}"
    money = re.fullmatch(r"(?:\$ ?(\d+(?:\.\d+)?)|(\d+(?:\.\d+)?) ?(?:\$|USD))", bare)
    return f"write {money[1] or money[2]}" if money is not None else ""


def _few_numbers(kind: str, name: str, model: type[BaseModel] | None) -> str:
    """Which numbers a field takes, where they are few."""
    field = model.model_fields.get(name) if model is not None and kind.startswith("int") else None
    limits = {type(m).__name__: m for part in _parts(field.annotation, field.metadata) for m in part} if field else {}
    low, high = (getattr(limits.get(kind), kind.lower(), None) for kind in ("Ge", "Le"))
    if not isinstance(low, int) or not isinstance(high, int) or high - low >= _FEW_NUMBERS:
        return ""
    return f"one of {', '.join(map(str, range(low, high + 1)))}"


def _parts(annotation: Any, metadata: list[Any]) -> Iterator[list[Any]]:
    """The constraints of an annotation, also of those inside optionals."""
    yield metadata
    for part in get_args(annotation):
        if hasattr(part, "__metadata__"):
            yield [item for outer in part.__metadata__ for item in (*getattr(outer, "metadata", ()), outer)]


def _wrong_type(kind: str, ctx: dict[str, Any], value: Any) -> tuple[str, str] | None:
    said = describe(value)
    if kind in ("int_type", "int_from_float", "int_parsing", "int_parsing_size"):
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            return f"expected a whole number, not {said}", f"write {int(value)}"
        return f"expected a whole number, not {said}", _number_hint(value, whole=True)
    if kind in ("float_type", "float_parsing"):
        return f"expected a number, not {said}", _number_hint(value)
    if kind in ("bool_type", "bool_parsing"):
        words = {"yes": "true", "on": "true", "no": "false", "off": "false", "1": "true", "0": "false"}
        wanted = words.get(str(value).lower(), "")
        return f"expected true or false, not {said}", f"write {wanted}" if wanted else ""
    if kind == "string_type":
        return f"expected text, not {said}", f'write "{value}" in quotes' if isinstance(value, int | float) else ""
    if kind in ("list_type", "tuple_type"):
        return f"expected a list, not {said}", "write [a, b, …]"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected a mapping of fields, not {said}", "write its fields indented below it"
    return None


def _range(value: Any, low: str, high: str) -> tuple[str, str]:
    return f"{describe(value)} is outside {low} to {high}", ""


def _figure(value: float) -> str:
    """A limit as people write it: 2016, 200,000, 1e18."""
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if value >= 10_000 else str(value)


def _out_of_range(kind: str, ctx: dict[str, Any], value: Any) -> tuple[str, str] | None:
    said = describe(value)
    if kind == "greater_than_equal":
        return f"{said} is too small: at least {_figure(ctx['ge'])}", ""
    if kind == "greater_than":
        return f"{said} is too small: more than {_figure(ctx['gt'])}", ""
    if kind == "less_than_equal":
        return f"{said} is absurdly large: at most {_figure(ctx['le'])}", ""
    if kind == "less_than":
        return f"{said} is too large: less than {_figure(ctx['lt'])}", ""
    if kind == "finite_number":
        return f"{said} is not a finite number", ""
    if kind == "too_short":
        return "an empty list says nothing", "remove the field, or fill it"
    if kind == "string_too_short":
        return "is empty", "write some text"
    if kind in ("string_too_long", "too_long"):
        return f"is too long: at most {ctx.get('max_length')} allowed", ""
    return None
