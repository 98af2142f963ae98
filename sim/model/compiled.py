"""How far torch.compile reaches behind the blocks (fact `compiled_end`): a whole model is one graph with its loss; code
that compiles block by block leaves the last norm to eager execution, and its loss unless it compiles that too.

Sources: torchtune 0.4.0 and 0.5.0 training/_compile.py (compile_model, compile_loss) and recipes; torchtitan 0.1.0
models/llama3/parallelize_llama.py (apply_compile), components/loss.py.
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.style import Style


def compiles_loss(style: Style) -> bool:
    """Whether the loss, or a chunk's, is compiled."""
    return style.stack.compiled_end in ("loss", "all", "chunks" if style.chunked_loss else "loss")


def splits_loss(style: Style) -> bool:
    """Whether PyTorch's own loss runs on logits whose vocabulary is cut over tensor ranks, step by step."""
    return style.tensor > 1 and style.stack.loss == "plain" and not compiles_loss(style)


def at_norm(style: Style, name: str) -> Style:
    """The style that a norm of this name has: the last one's may be eager."""
    if name != "final_norm" or not style.stack.compile or style.stack.compiled_end == "all":
        return style
    return replace(style, stack=replace(style.stack, compile=False))
