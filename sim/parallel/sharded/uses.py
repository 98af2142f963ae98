"""Uses of parameters in a micro-step of DeepSpeed's ZeRO-3: every sub-module, in the order in which hooks see it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from sim.model.architecture import Layer, Operator, Parameter
from sim.model.recompute import again_operators
from sim.model.tuning import Frozen
from sim.parallel.sharded.coordinator import Wanted
from sim.parallel.sharded.quantised import arrives_as
from sim.parallel.sharded.submodules import Submodule, submodules
from sim.parallel.step import Plan
from sim.work import DTYPE_BYTES

#: DeepSpeed `config.py`: parameters of fewer elements stay whole.
PERSISTENCE_THRESHOLD = 100_000


@dataclass(frozen=True, slots=True)
class Use:
    """One direction of one sub-module: what it needs, and its kernels.

    Attributes:
        direction: "forward", "recompute" or "backward".
        first: whether it is the first use of its layer in forward, or in backward with recomputation.
        opens: whether it is the first of its layer's backward behind recomputation.
    """

    position: int
    layer: Layer
    part: Submodule
    direction: str
    first: bool
    wanted: tuple[Wanted, ...]
    opens: bool = False

    @property
    def phase(self) -> str:
        """Recomputation belongs to backward."""
        return "forward" if self.direction == "forward" else "backward"


class Uses:
    """The uses of one job.

    Args:
        fetching: whether parameters have to be fetched at all.
    """

    def __init__(self, plan: Plan, fetching: bool) -> None:
        self.plan, self.fetching = plan, fetching
        self.parts: dict[int, tuple[Submodule, ...]] = {}
        self.kept: list[Layer] = []  # keeps layers alive, so that an id stands for one layer only
        stack = plan.architecture.stack
        self.owners = {p.name: i for i, layer in enumerate(stack) if layer.kind != "block"
                       for p in layer.weights}
        # what is frozen is gathered as it is stored: packed weights have the gathers' dtype (bnb_4bit_quant_storage)
        width = DTYPE_BYTES[arrives_as(plan.scenario.training.precision)]
        self.stored = {f.name: round(sum(f.parameter(plan.stack.constants_apart)) / width)
                       for layer in stack for f in layer.frozen}

    def of(self, stack: Sequence[Layer]) -> Iterator[Use]:
        """Every use of a micro-step, in order."""
        for position, layer in enumerate(stack):
            for number, part in enumerate(self.parts_of(layer)):
                yield self.use(position, layer, part, "forward", number == 0)
        for position, layer in reversed(list(enumerate(stack))):
            again = self.plan.policy(position) in ("full", "selective-op")  # whose modules and hooks run again as well
            parts = self.parts_of(layer)
            if again:
                for number, part in enumerate(parts):
                    yield self.use(position, layer, part, "recompute", number == 0)
            for number, part in enumerate(reversed(parts)):
                use = self.use(position, layer, part, "backward", number == 0 and not again)
                yield replace(use, opens=number == 0 and again)

    def use(self, position: int, layer: Layer, part: Submodule, direction: str, first: bool) -> Use:
        """One use; a shared parameter goes by the layer that owns it."""
        shared = {p.name for p in layer.shared}
        wanted = () if not self.fetching or (direction == "recompute" and not part.again) else tuple(
            ((self.owners.get(p.name, position) if p.name in shared else position, p.name), self.elements(p))
            for p in part.parameters)
        return Use(position, layer, part, direction, first, wanted)

    def looked_up(self, stack: Sequence[Layer]) -> dict[Hashable, int]:
        """Trained parameters that rows are looked up in by token and position numbers, which need no gradient, and
        their elements."""
        return {name: numel for use in self.of(stack) if use.direction == "backward" and use.layer.kind == "embedding"
                and any(op.forward and op.forward[0].op == "embedding" for op in use.part.operators)
                for (name, numel), p in zip(use.wanted, use.part.parameters, strict=True)
                if not isinstance(p, Frozen)} if self.fetching else {}

    def read_outside(self, stack: Sequence[Layer]) -> frozenset[Hashable]:
        """Those that Megatron's language model reads for its head beside their module (model/gpt_model.py,
        parallel_lm_logits of word_embeddings_weight(); partition_parameters.py, register_external_parameter)."""
        shared = {p.name for layer in stack for p in layer.shared}
        return frozenset(name for name in self.looked_up(stack) if isinstance(name, tuple) and name[1] in shared
                         and self.plan.stack.modules == "megatron")

    def modules(self, stack: Sequence[Layer]) -> list[tuple[int, int]]:
        """Modules without split parameters that hooks see in front of what each use needs, and behind it: a block
        itself, at the beginning of each direction, and what owns small parameters alone (norms). Those without
        parameters within a block differ from code to code and are not counted."""
        found = []
        for use in self.of(stack):
            runs = use.part.operators if use.direction != "recompute" or use.part.again else ()
            ordered = runs[::-1] if use.direction == "backward" else runs
            owners = [any(self._split(p) for p in op.weights) for op in ordered if op.weights]
            own = owners.index(True) if True in owners else 0 if use.wanted else len(owners)
            begins = use.layer.kind == "block" and (use.first or use.opens)
            found.append((own + begins, max(0, len(owners) - owners.count(True) - own)))
        return found

    def _split(self, parameter: Parameter | Frozen) -> bool:
        return parameter.numel >= PERSISTENCE_THRESHOLD

    def elements(self, parameter: Parameter | Frozen) -> int:
        """Of the gathers' dtype."""
        return self.stored.get(parameter.name, parameter.numel)

    def parts_of(self, layer: Layer) -> tuple[Submodule, ...]:
        """Sub-modules of a layer, memoised."""
        if id(layer) not in self.parts:
            self.kept.append(layer)
            self.parts[id(layer)] = submodules(layer, PERSISTENCE_THRESHOLD)
        return self.parts[id(layer)]


def rerun(use: Use, policy: str) -> Sequence[Operator]:
    """Operators of a use that recomputation runs again: all, or those whose outputs are not kept."""
    if policy == "full":
        return use.part.again
    left = {op.name: op for op in again_operators(use.layer)}
    return [left[op.name] for op in use.part.again if op.name in left]
