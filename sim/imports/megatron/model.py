"""The model that Megatron-LM's arguments describe.

Names and defaults: megatron-core 0.16.1 transformer/transformer_config.py; Megatron-LM's arguments.py (recalled, where
its defaults are its own).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from sim.catalog import table
from sim.errors import nearest
from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args
from sim.imports.settings import Said

#: --position-embedding-type -> model.positions; yarn and mrope turn queries and keys as rope does.
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "mrope": "rotary", "none": "none",
              "relative": "relative", "alibi": "alibi"}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
#: Kinds of models by part of the program's name (pretrain_bert.py, pretrain_t5.py).
_KINDS = {"bert": "encoder", "t5": "encoder-decoder"}
#: attention_dropout and hidden_dropout where nothing is said.
_DROPOUT = 0.1
_LONGEST_PATTERN = 2_000


def choice(said: Said, known: Mapping[str, Any]) -> Any:
    """What a word stands for. Raises UserError."""
    word = said.word()
    if word not in known:
        raise said.wrong(f"one of {', '.join(known)}", nearest(word, known))
    return known[word]


def read_model(args: Args, draft: Draft) -> None:
    """Fields of `model`."""
    for program in args.programs:
        name = program.rpartition("/")[2].lower()
        for part, kind in _KINDS.items():
            if part in name:
                draft.assume("model.kind", kind, f"the script starts {name}")
    _sizes(args, draft)
    _form(args, draft)
    _vocabulary(args, draft)
    _experts(args, draft)
    _latent(args, draft)
    _window(args, draft)
    _dropout(args, draft)


def _sizes(args: Args, draft: Draft) -> None:
    both = args.get("num_layers")
    encoder, decoder = args.get("encoder_num_layers") or both, args.get("decoder_num_layers") or both
    pair = draft.value("model.kind") == "encoder-decoder"
    for path, said in (("model.layers", encoder if pair else both or encoder),
                       ("model.decoder_layers", decoder if pair else None),
                       ("model.hidden", args.get("hidden_size")), ("model.heads", args.get("num_attention_heads")),
                       ("model.max_positions", args.get("max_position_embeddings"))):
        if said is not None:
            draft.take(path, said.whole(), said)
    hidden, heads = draft.value("model.hidden"), draft.value("model.heads")
    width = args.get("kv_channels")
    if width is not None and not (heads and width.whole() * heads == hidden):
        draft.take("model.head_dim", width.whole(), width)
    groups = args.get("num_query_groups")
    # The command line asks for grouped heads by a switch beside; TransformerConfig has their number alone.
    grouped = args.on("group_query_attention") is not None
    alone = groups is not None and not groups.name.startswith("--") and args.get("group_query_attention") is None
    if groups is not None and (grouped or alone):
        draft.take("model.kv_heads", groups.whole(), groups)
    if said := args.get("ffn_hidden_size"):
        draft.take("model.ffn", said.whole(), said)
    elif hidden and args.on("swiglu", "gated_linear_unit"):
        draft.assume("model.ffn", int(4 * hidden * 2 / 3 / 64) * 64,
                     "arguments.py: two thirds of 4 x hidden, in steps of 64, with --swiglu")


def _form(args: Args, draft: Draft) -> None:
    """Activation, norms, biases and positions."""
    if said := args.on("swiglu", "gated_linear_unit"):
        draft.take("model.gated_mlp", True, said)
        draft.assume("model.activation", "silu", said.name)
    if (said := args.get("activation_func")) and said.word() == "swiglu":
        draft.take("model.gated_mlp", True, said)
        draft.assume("model.activation", "silu", said.name)
    if said := args.on("quick_geglu"):
        draft.take("model.gated_mlp", True, said)
        draft.assume("model.activation", "gelu", "--quick-geglu")
    if said := args.on("squared_relu"):
        draft.take("model.activation", "relu", said, "its square is not counted")
    if said := args.on("openai_gelu", "onnx_safe"):
        draft.take("model.activation", "gelu-new", said)
    if said := args.get("normalization"):
        draft.take("model.norm", choice(said, _NORMS), said)
    if said := args.off("add_bias_linear", "disable_bias_linear"):
        draft.take("model.bias", False, said)
    if said := args.on("add_qkv_bias"):
        draft.take("model.qkv_bias", True, said)
    if said := args.on("qk_layernorm"):
        if args.on("multi_latent_attention"):
            draft.leave(said, "norms of the compressed queries and keys come with latent attention")
        else:
            draft.take("model.qk_norm", "head", said)
    if (said := args.get("mtp_num_layers")) and said.whole(0):
        draft.take("model.mtp_layers", said.whole(), said)
    if said := args.on("untie_embeddings_and_output_weights"):
        draft.take("model.tied_embeddings", False, said)
    elif said := args.get("share_embeddings_and_output_weights"):
        draft.take("model.tied_embeddings", said.flag(), said)
    rotary = args.on("use_rotary_position_embeddings")
    if said := args.get("position_embedding_type"):
        draft.take("model.positions", choice(said, _POSITIONS), said)
    elif rotary is not None:
        draft.take("model.positions", "rotary", rotary)


def _vocabulary(args: Args, draft: Draft) -> None:
    """Rows of the embedding: the tokenizer's and --vocab-extra-ids, to which Megatron adds rows until tensor ranks have
    a multiple of 128 (training/tokenizer/tokenizer.py, _vocab_size_with_padding), as the simulator does for this
    framework."""
    whole = [args.get(name) for name in ("pad_vocab_size_to", "padded_vocab_size")]
    rows, extra = args.get("vocab_size"), args.get("vocab_extra_ids")
    kind, more = args.get("tokenizer_type"), extra.whole(0) if extra is not None else 0
    multiple, cut = args.get("make_vocab_size_divisible_by"), args.get(*_TENSOR)
    size, text = rows.whole() + more if rows is not None else 0, ""
    if said := next((one for one in whole if one is not None), None):
        draft.take("model.vocab", said.whole(), said)
        return
    if rows is None and not draft.has("model.hf"):
        size, text = _of_tokenizer(args, draft)
        size += more if size else 0
    elif kind is not None and kind.value == "NullTokenizer":
        size += 1  # _NullTokenizer: one more for the end of a document
    ranks = cut.whole() if cut is not None else 1
    if multiple is not None and size:
        step, usual = multiple.whole() * ranks, _MULTIPLE * ranks
        if multiple.whole() > _MULTIPLE:
            size = -(-size // step) * step
        elif -(-size // step) * step != -(-size // usual) * usual:
            draft.leave(multiple, f"rows are counted up to a multiple of {_MULTIPLE} for each tensor rank")
    added = f"with {more} of --vocab-extra-ids" if more else ""
    if rows is not None:
        draft.take("model.vocab", size, rows, added)
    elif size:
        draft.assume("model.vocab", size, f"{text}, {added}" if added else text)


def _of_tokenizer(args: Args, draft: Draft) -> tuple[int, str]:
    """Rows of the tokenizer that is named, else of the program's own, and why; 0 if they are not known."""
    known = table("imports/megatron/names.yaml")
    kind, model = args.get("tokenizer_type"), args.get("tokenizer_model", "tokenizer_name_or_path")
    for said, sizes in ((kind, known["tokenizers"]), (model, known["tokenizer_models"])):
        name = str(said.value).lower() if said is not None else ""
        size = next((size for part, size in sizes.items() if said is not None and part.lower() in name), None)
        if size is not None:
            return size, f"the vocabulary of {name[:60]}"
    if args.get("merge_file") is not None:  # byte pairs: Megatron-LM's scripts have GPT-2's
        return known["tokenizers"]["GPT2BPETokenizer"], "GPT-2's vocabulary, for --merge-file"
    if kind is not None:
        draft.leave(kind, "its vocabulary is not known here: --set model.vocab=N")
        return 0, ""
    for program in args.programs:
        own = known["program_tokenizers"].get(program.rpartition("/")[2])
        if own is not None:
            return known["tokenizers"][own], f"{own}, {program.rpartition('/')[2]}'s own"
    return 0, ""


_TENSOR = ("tensor_model_parallel_size", "model_parallel_size")
#: --make-vocab-size-divisible-by where nothing is said.
_MULTIPLE = 128


def _experts(args: Args, draft: Draft) -> None:
    number = args.get("num_experts", "num_moe_experts")
    top, width = args.get("moe_router_topk", "topk"), args.get("moe_ffn_hidden_size")
    shared, pattern = args.get("moe_shared_expert_intermediate_size"), args.get("moe_layer_freq", "expert_interval")
    groups, best = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    capacity = args.get("moe_expert_capacity_factor")
    if number is None or number.whole(0) < 2:
        return
    draft.take("model.moe.experts", number.whole(), number)
    if top is not None:
        draft.take("model.moe.top_k", top.whole(), top)
    else:
        draft.assume("model.moe.top_k", 2, "moe_router_topk of transformer_config.py")
    if width is not None:
        draft.take("model.moe.expert_ffn", width.whole(), width)
    each = width.whole() if width is not None else draft.value("model.ffn") or 4 * (draft.value("model.hidden") or 0)
    if shared is not None and shared.whole(0):
        count, rest = divmod(shared.whole(), each or 1)
        if rest or not count:
            draft.leave(shared, "shared experts are as wide as the routed ones")
        else:
            draft.take("model.moe.shared_experts", count, shared)
    if groups is not None and best is not None:
        draft.take("model.moe.groups", groups.whole(), groups)
        draft.take("model.moe.top_groups", best.whole(), best)
    if capacity is not None and capacity.number() > 0:
        draft.take("model.moe.capacity", capacity.number(), capacity)
        padded = args.on("moe_pad_expert_input_to_capacity")
        draft.take("model.moe.padded", padded is not None, padded or capacity)
    if pattern is not None:
        _pattern(pattern, draft)


def _pattern(said: Said, draft: Draft) -> None:
    """--moe-layer-freq: one block of so many, or ones and zeros, also as Python (`([0]*3+[1]*58)`)."""
    value = said.value
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit()):
        if said.whole() > 1:
            draft.take("model.moe.every", said.whole(), said)
        return
    blocks = _listed(said)
    first = blocks.index(1) if 1 in blocks else len(blocks)
    rest = blocks[first:]
    every = next((i for i, one in enumerate(rest[1:], 1) if one), 1)
    if rest and rest != [int(i % every == 0) for i in range(len(rest))]:
        draft.leave(said, "no field says which blocks are mixtures one by one: those behind the first dense ones are")
        every = 1
    if first:
        draft.take("model.moe.first_dense", first, said)
    if every > 1:
        draft.take("model.moe.every", every, said)


def _listed(said: Said) -> list[int]:
    """A list of ones and zeros. Raises UserError."""
    if isinstance(said.value, list) and all(one in (0, 1) for one in said.value):
        return [int(one) for one in said.value]
    text = " ".join(map(str, said.value)) if isinstance(said.value, list) else str(said.value)
    try:
        if len(text) <= _LONGEST_PATTERN:
            return _repeated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise said.wrong("a whole number, or a list of ones and zeros such as ([0]*3+[1]*58)")


def _repeated(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List) and all(isinstance(one, ast.Constant) and one.value in (0, 1) for one in node.elts):
        return [int(ast.literal_eval(one)) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _repeated(node.left) + _repeated(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times, blocks = node.right.value, _repeated(node.left)
        if isinstance(times, int) and 0 <= times * len(blocks) <= _LONGEST_PATTERN:
            return blocks * times
    raise ValueError


def _latent(args: Args, draft: Draft) -> None:
    """Latent attention. Defaults are those of arguments.py (_add_mla_args; recalled)."""
    said = args.on("multi_latent_attention")
    for path, name, usual in (("q_rank", "q_lora_rank", 0), ("kv_rank", "kv_lora_rank", 32),
                              ("nope_dim", "qk_head_dim", 128), ("rope_dim", "qk_pos_emb_head_dim", 64),
                              ("value_dim", "v_head_dim", 128)):
        one = args.get(name)
        if said is None:
            continue
        if one is not None:
            draft.take(f"model.mla.{path}", one.whole(0), one)
        else:
            draft.assume(f"model.mla.{path}", usual, f"--{name.replace('_', '-')} of arguments.py")


def _window(args: Args, draft: Draft) -> None:
    """--window-size left,right: a token attends to itself and so many before it."""
    said, skips = args.get("window_size"), args.get("window_attn_skip_freq")
    if said is None:
        return
    parts = said.value if isinstance(said.value, list) else str(said.value).strip("()[] ").replace(",", " ").split()
    try:
        left = int(str(parts[0]).strip("(,) "))
    except (IndexError, ValueError):
        raise said.wrong("two whole numbers such as 4095,0") from None
    if left < 0:
        return
    draft.take("model.window", left + 1, said)
    if skips is not None and str(skips.value).isdigit() and skips.whole() > 1:
        draft.take("model.full_every", skips.whole(), skips)
    elif skips is not None:
        draft.leave(skips, "no field says which blocks have a window one by one")


def _dropout(args: Args, draft: Draft) -> None:
    said = {name: args.get(f"{name}_dropout") for name in ("hidden", "attention")}
    values = {name: one.number() if one is not None else _DROPOUT for name, one in said.items()}
    hidden, attention = said["hidden"], said["attention"]
    if hidden is not None:
        draft.take("model.dropout", values["hidden"], hidden)
    else:
        draft.assume("model.dropout", values["hidden"], "--hidden-dropout of arguments.py")
    if attention is not None and values["attention"] != values["hidden"]:
        draft.leave(attention, "model.dropout is one for both, that of --hidden-dropout")
