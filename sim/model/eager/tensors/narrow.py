"""Products in 8 bits and below, as allocations: the quantised copies of what they read."""

from __future__ import annotations

from dataclasses import replace

from sim.model.eager.tensors.autograd import Node, Run
from sim.model.eager.tensors.storage import COPIES, Storage
from sim.model.style import Style
from sim.work import DTYPE_BYTES


class Narrow:
    """Quantised copies around a product: each tensor as it is and transposed (`sim.model.kernels.quantisation`).

    Attributes:
        keeps_inputs: what is kept is the input, not its copies. caches_weights: the weight's copies are elsewhere.
        compiled: torch.compile writes them (`sim.model.compiled_casts`). What makes an input makes it again in
            backward, and the weight's turned copy is kept, but in what a checkpoint makes again.
    """

    def __init__(self, dtype: str, keeps_inputs: bool, caches_weights: bool, compiled: bool = False) -> None:
        self.dtype, self.keeps_inputs, self.caches_weights = dtype, keeps_inputs and not compiled, caches_weights
        self.compiled = compiled

    def copies(self, run: Run, elements: int) -> list[Storage]:
        """A tensor's two copies."""
        return [run.new(elements, self.dtype) for _ in range(2)]

    def forward(self, run: Run, node: Node, inputs: int, weights: int, gathered: int = 1) -> list[Storage]:
        """Copies of the input and the weight; returns those that last only as long as the product.

        Backward reads the transposed input, and the weight both ways. Of an input gathered from `gathered` slices only
        this rank's is kept.
        """
        spare = [self.once(run, inputs)] if self.compiled else self.copies(run, inputs)
        kind, run.kind = run.kind, COPIES
        weight = [] if self.caches_weights else self.copies(run, weights)
        if self.compiled and not run.checkpointed:
            run.save(node, weight.pop() if weight else self.once(run, weights))
        run.kind = kind
        if self.compiled or self.keeps_inputs:
            return [*spare, *weight]
        run.save(node, run.new(inputs // gathered, self.dtype) if gathered > 1 else spare.pop(), *weight)
        return spare

    def backward(self, run: Run, inputs: int, weights: int, outputs: int, kept: bool) -> list[Storage]:
        """Copies that backward makes of the output's gradient; compiled, those of the input and of the weight, unless
        it is `kept`, stand beside them."""
        more = [inputs, *([] if kept else [weights])] if self.compiled else []
        return [*self.copies(run, outputs), *(self.once(run, elements) for elements in more)]

    def frozen(self, run: Run, node: Node, inputs: int, weights: int) -> list[Storage]:
        """The same of a weight that is not trained: nobody reads the transposed input, so it is not made, let alone
        kept (`sim.model.adapters.narrow_frozen`)."""
        spare = [self.once(run, inputs)]
        kind, run.kind = run.kind, COPIES
        weight = [] if self.caches_weights else self.copies(run, weights)
        run.kind = kind
        run.save(node, *weight)
        return spare

    def once(self, run: Run, elements: int) -> Storage:
        """A tensor's copy as it is."""
        return run.new(elements, self.dtype)


def keeping(style: Style) -> Style:
    """The style of a product that keeps its input and quantises it again in backward, where others keep what is
    quantised (TransformerEngine's `save_original_input`, which Megatron-LM sets where that input is there anyway)."""
    return replace(style, stack=replace(style.stack, narrow_keeps_inputs=True))


def narrow(style: Style) -> Narrow | None:
    """How the blocks' products are quantised; None where they run in the activations' dtype."""
    if DTYPE_BYTES[style.gemm] >= DTYPE_BYTES[style.act]:
        return None
    stack = style.stack
    return Narrow(style.gemm, stack.narrow_keeps_inputs, stack.narrow_weights_cached or style.arrives_narrow,
                  style.compiles_casts and not style.scattered)
