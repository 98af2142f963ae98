"""Facts of Hugging Face's model code, which differ by its releases; part of every `Stack`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HuggingFace:
    """What transformers' modules do between and behind their products. Other modules read none of it.

    Attributes:
        decoder_loss: how a decoder's forward comes from logits to its loss: own (each model's code: families of Llama's
            kind cast logits to fp32, which then stand in the narrow ones' place; all copy them shifted by a token),
            mixed (Llama's kind casts within the common function, beside the narrow ones; others as before), shifted
            (all by the common function) or padded (labels are shifted in place of logits).
        biased_softmax_wide: softmax of scores that relative positions were added to is taken in fp32.
        relative_bias_anew: a token's relative positions are looked up for all queries so far, and the last is used.
        rotary_tables: launches of every block that look its tokens' cos and sin up, or make them.
    """

    decoder_loss: str
    biased_softmax_wide: bool
    relative_bias_anew: bool
    rotary_tables: int

    def widens_logits(self, llama: bool) -> bool:
        """Whether a decoder's logits are cast to fp32 in front of its loss.

        Args:
            llama: it is of Llama's kind.
        """
        return llama or self.decoder_loss in ("shifted", "padded")

    @property
    def narrow_logits_stay(self) -> bool:
        """Whether logits as the product made them last until the loss is there, beside those that were cast."""
        return self.decoder_loss != "own"

    @property
    def shifts_logits(self) -> bool:
        """Whether a decoder's logits are cut by a token and copied in front of its loss."""
        return self.decoder_loss != "padded"
