"""What can be asked in place of a config whose family is not read: the nearest of what is simulated, in its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Encoders of pictures: blocks like BERT's over patches, and a class token.
_PICTURES = ("vit", "deit", "beit", "dinov2", "siglip_vision_model", "clip_vision_model", "vit_mae", "ijepa")
#: Encoder-decoders with BART's names of sizes.
_BART_LIKE = ("bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart", "whisper", "speech_to_text")
#: Whose blocks are no attention, or not all of them.
_NO_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "zamba", "zamba2", "bamba", "recurrent_gemma",
                 "nemotron_h", "granitemoehybrid", "qwen3_next", "lfm2", "retnet", "hyena")


def instead_of(values: Mapping[str, Any]) -> str:
    """A hint for a config of a family that is not read; "" where nothing near is simulated."""
    family = values.get("model_type")
    if family in _NO_ATTENTION:
        return "state spaces and linear attention are not simulated"
    sizes = {name: size for name, size in values.items() if isinstance(size, int) and not isinstance(size, bool)}
    try:
        if family in _PICTURES:
            return _pictures(sizes)
        if family in _BART_LIKE:
            return _bart_like(sizes)
    except KeyError:  # a config that leaves sizes to its class
        return ""
    return ""


def _pictures(sizes: Mapping[str, int]) -> str:
    patches = (sizes["image_size"] // sizes["patch_size"]) ** 2 + 1
    model = (f"kind: encoder, layers: {sizes['num_hidden_layers']}, hidden: {sizes['hidden_size']}, heads: "
             f"{sizes['num_attention_heads']}, ffn: {sizes.get('intermediate_size', 4 * sizes['hidden_size'])}, "
             f"activation: gelu, vocab: 1000, max_positions: {patches}, tied_embeddings: false")
    return (f"nearest: {{{model}}} with training.sequence: {patches}, its patches, and predicted_tokens: 1; vocab "
            "stands for the classes, and its table for the patches' projection")


def _bart_like(sizes: Mapping[str, int]) -> str:
    heads = sizes["encoder_attention_heads"]
    model = (f"kind: encoder-decoder, layers: {sizes['encoder_layers']}, decoder_layers: {sizes['decoder_layers']}, "
             f"hidden: {sizes['d_model']}, heads: {heads}, ffn: {sizes['encoder_ffn_dim']}, vocab: "
             f"{sizes['vocab_size']}, positions: learned, max_positions: "
             f"{sizes.get('max_source_positions', sizes.get('max_position_embeddings', 1024))}")
    read = sizes.get("max_source_positions")
    heard = f" with training.sequence: {read}, what its convolutions make of the sound (they are left out)"
    return f"nearest: {{{model}}}{heard if read else ''}"
