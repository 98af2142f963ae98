"""A Hugging Face `config.json` read into fields of `model`, and the families that are neither Llamas nor mixtures.

Keys and class defaults: transformers, src/transformers/models/<family>/configuration_<family>.py. Left out: attention
sinks (gpt-oss), biases of a head alone, which are a few thousand parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError, nearest
from sim.scenario.hf.config import Config
from sim.scenario.hf.llamas import LLAMAS, sizes
from sim.scenario.hf.mixtures import MIXTURES
from sim.scenario.hf.unknown import instead_of
from sim.scenario.text.document import beside, describe, read_text


def _bigcode(c: Config) -> dict[str, Any]:
    shared: dict[str, Any] = {"kv_heads": 1, "fused_qkv": "parts"}
    fields = shared if c.flag("multi_query", True) else {"fused_qkv": "heads"}
    return {**_gpt2(c), "activation": c.activation("activation_function", default="gelu"), **fields}


def _gptj(c: Config) -> dict[str, Any]:
    fields = {**_gpt2(c), "positions": "rotary", "parallel_block": True,
              "activation": c.activation("activation_function", default="gelu-new")}
    return {**fields, "tied_embeddings": c.flag("tie_word_embeddings", False)}


def _opt(c: Config) -> dict[str, Any]:
    hidden = c.whole("hidden_size")
    same = c.whole("word_embed_proj_dim", default=hidden) == hidden
    c.must(same, "word_embed_proj_dim", "embeddings of another width")
    return {
        "layers": c.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": c.whole("num_attention_heads"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_position_embeddings", default=2048) + 2,
        "ffn": c.whole("ffn_dim"),
        "activation": c.activation("activation_function", default="relu"),
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }


def _bloom(c: Config) -> dict[str, Any]:
    return {
        "layers": c.whole("n_layer", "num_hidden_layers"),
        "hidden": c.whole("hidden_size", "n_embed"),
        "heads": c.whole("n_head", "num_attention_heads"),
        "vocab": c.whole("vocab_size"),
        "positions": "alibi",
        "fused_qkv": "heads",
        "tied_embeddings": True,
    }


def _falcon(c: Config) -> dict[str, Any]:
    """7B has one head of keys and values, what is newer a few; attention and MLP stand side by side in both."""
    newer, heads = c.flag("new_decoder_architecture", False), c.whole("num_attention_heads", "n_head")
    several = c.whole("num_kv_heads", "n_head_kv", default=heads) if newer else (
        1 if c.flag("multi_query", True) else heads)
    hidden = c.whole("hidden_size")
    return {
        "layers": c.whole("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": several,
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_position_embeddings", default=2048),
        "ffn": c.whole("ffn_hidden_size", default=4 * hidden),
        "positions": "alibi" if c.flag("alibi", False) else "rotary",
        "fused_qkv": "groups" if newer or several == 1 else "heads",
        "bias": c.flag("bias", False),
        "parallel_block": newer or c.flag("parallel_attn", True),
        **({"parallel_norms": 2} if newer and c.whole("num_ln_in_parallel_attn", default=2) == 2 else {}),
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }


def _mpt(c: Config) -> dict[str, Any]:
    attention = c.values.get("attn_config")
    alibi = isinstance(attention, dict) and attention.get("alibi", True) is True
    hidden = c.whole("d_model")
    return {
        "layers": c.whole("n_layers"),
        "hidden": hidden,
        "heads": c.whole("n_heads"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_seq_len", default=2048),
        "ffn": c.whole("expansion_ratio", default=4) * hidden,
        "positions": "alibi" if alibi else "learned",
        "fused_qkv": "parts",
        "bias": not c.flag("no_bias", True),
        "tied_embeddings": True,
    }


def _phi(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        "activation": c.activation("hidden_act", default="gelu-new"),
        "positions": "rotary",
        "rotary_share": c.rotary_share(default=0.5),
        "parallel_block": True,
        "tied_embeddings": c.flag("tie_word_embeddings", False),
    }


def _gpt2(c: Config) -> dict[str, Any]:
    fields = {
        "layers": c.whole("n_layer"),
        "hidden": c.whole("n_embd"),
        "heads": c.whole("n_head"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("n_positions", default=1024),
        "activation": c.activation("activation_function", default="gelu").removesuffix("-new"),  # GPT-2's code is known
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }
    inner = c.optional("n_inner")
    return {**fields, **({"ffn": inner} if inner else {})}


def _gpt_neox(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        "activation": c.activation("hidden_act", default="gelu"),
        "positions": "rotary",
        "fused_qkv": "heads",
        "rotary_share": c.rotary_share("rotary_pct", default=0.25),
        "parallel_block": c.flag("use_parallel_residual", True),
        **({"parallel_norms": 2} if c.flag("use_parallel_residual", True) else {}),
        "tied_embeddings": c.flag("tie_word_embeddings", False),
    }


def _bert(c: Config) -> dict[str, Any]:
    return {**sizes(c), "kind": "encoder", "activation": c.activation("hidden_act", default="gelu")}


def _mt5(c: Config) -> dict[str, Any]:
    """T5's blocks, gated and with a head of its own where the config does not say (MT5Config)."""
    return _t5(c, "gated-gelu", tied=False)


def _t5(c: Config, usual: str = "relu", tied: bool = True) -> dict[str, Any]:
    projection = str(c.values.get("feed_forward_proj", usual))
    layers = c.whole("num_layers")
    return {
        "kind": "encoder-decoder",
        "layers": layers,
        "decoder_layers": c.whole("num_decoder_layers", default=layers),
        "hidden": c.whole("d_model"),
        "heads": c.whole("num_heads"),
        "head_dim": c.whole("d_kv"),
        "ffn": c.whole("d_ff"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("n_positions", default=512),
        "gated_mlp": projection.startswith("gated"),
        "activation": "gelu" if "gelu" in projection else "relu",
        "positions": "relative",
        "norm": "rmsnorm",
        "bias": False,
        "tied_embeddings": c.flag("tie_word_embeddings", tied),
    }


_FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    **LLAMAS,
    **MIXTURES,
    "phi": _phi,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_bigcode": _bigcode,
    "gptj": _gptj,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
    "t5": _t5,
    "mt5": _mt5,
}


def read_config(folder: Path, written: str) -> dict[str, Any]:
    """Fields of `model` from a `config.json`, or from the folder that holds one.

    Raises:
        UserError: unreadable, not JSON, of an unknown family, or lacking a size.
    """
    path = beside(folder, written)
    shown = written
    if path.is_dir():
        path, shown = path / "config.json", f"{written.rstrip('/')}/config.json"
    text = read_text(path, shown)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        raise UserError(
            Fault(f"is not JSON: {getattr(error, 'msg', 'nested too deeply')}", file=shown, line=line)
        ) from None
    if not isinstance(values, dict):
        raise UserError(Fault(f"holds {describe(values)} where a config was expected", file=shown, line=1))
    family = values.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        near = nearest(family, _FAMILIES) if isinstance(family, str) else ""
        hint = instead_of(values) or "; ".join([*([near] if near else []), f"known: {', '.join(_FAMILIES)}",
                                                "for another give kind, layers, hidden, heads … in place of hf"])
        inner = values.get("text_config")
        if isinstance(inner, dict) and inner.get("model_type") in _FAMILIES:
            hint = (f"its language model is: write 'text_config' ({inner['model_type']}) into a file of its own; what "
                    "reads pictures or sound is not simulated")
        message = "the config has no 'model_type'" if family is None else (
            f"models of the type {describe(family).removeprefix('the text ')} are not known")
        line = text.count("\n", 0, text.find('"model_type"')) + 1 if family is not None else 0
        raise UserError(Fault(message, field="model_type", file=shown, line=line, hint=hint))
    config = Config(values, shown, text)
    fields = _FAMILIES[family](config)
    if config.faults:
        raise UserError(config.faults)
    return fields
