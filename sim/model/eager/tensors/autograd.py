"""A miniature of PyTorch's eager autograd that knows sizes only: which tensors are alive, when, and of what kind.

Layers are written down as they are in PyTorch (`decoder.py` ...), in terms of `operations.py`. Nothing is computed;
every storage adds its bytes to a `Memory` when it is born and takes them back when the last reference to it goes, as
PyTorch's do: module code holds tensors in local variables, autograd nodes hold what they saved, the engine holds
gradients on their way. So the order of allocations is the host's order, and peaks need no rules of thumb.

Sources: torch/csrc/autograd/engine.cpp (nodes run by falling sequence number; a node's gradients are dropped when it
returns, its saved tensors after that), saved_variable.cpp, torch/utils/checkpoint.py (non-reentrant); Megatron-LM
core/tensor_parallel/random.py (CheckpointWithoutOutput).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from sim.model.eager.tensors.storage import ACTIVATIONS, GRADIENTS, LOGITS, WORKSPACE, Memory, Storage, rounded


class Sink(Protocol):
    """Where a gradient can go."""

    def receive(self, run: Run, gradient: Storage) -> None:
        """Take a gradient; one that is there already is added to in place."""


class Tensor:
    """A (view of a) storage with its place in the graph; `sink` is None where no gradient is needed."""

    __slots__ = ("dtype", "elements", "sink", "storage")

    def __init__(self, storage: Storage, elements: int, dtype: str, sink: Sink | None) -> None:
        self.storage, self.elements, self.dtype, self.sink = storage, elements, dtype, sink


Gradients = list["Storage | None"]
#: From the gradients of a node's outputs to those of its inputs.
Rule = Callable[["Run", Gradients], Sequence["Storage | None"]]


class Node:
    """One backward function; `idle` if no input needs a gradient: PyTorch then makes no node and saves nothing."""

    __slots__ = ("frame", "gradients", "idle", "kind", "operator", "place", "rule", "saved", "sinks", "wakes")

    def __init__(self, rule: Rule, sinks: tuple[Sink | None, ...], outputs: int, operator: str, kind: int) -> None:
        self.rule, self.sinks, self.operator, self.kind = rule, sinks, operator, kind
        self.gradients: Gradients = [None] * outputs
        self.saved: list[Storage] = []
        self.frame: Frame | None = None  # checkpointed: what was saved comes back with the frame
        self.place: list[int] = []
        self.wakes: list[Frame] = []  # whose outputs are to be there again when this one runs
        self.idle = all(sink is None for sink in sinks)

    def output(self, index: int = 0) -> Output | None:
        """Where the gradient of an output goes."""
        return None if self.idle else Output(self, index)


class Output:
    """One output of a node."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int) -> None:
        self.node, self.index = node, index

    def receive(self, run: Run, gradient: Storage) -> None:
        """Take a gradient; one that is there already is added to in place, if nobody else has it."""
        there = self.node.gradients[self.index]
        if there is None:
            self.node.gradients[self.index] = gradient
        elif there is run.given:
            self.node.gradients[self.index] = run.sum_of(there)


class Dropped:
    """A tensor that needs no gradient, where a layer is asked to take one all the same: it goes at once."""

    def receive(self, run: Run, gradient: Storage) -> None:
        """Take a gradient and keep nothing of it."""


class Boundary:
    """The layer's input: its gradient leaves the layer."""

    def __init__(self) -> None:
        self.gradient: Storage | None = None

    def receive(self, run: Run, gradient: Storage) -> None:
        """Take a gradient; one that is there already is added to in place, if nobody else has it."""
        if self.gradient is None:
            gradient.become(WORKSPACE)
            self.gradient = gradient
        elif self.gradient is run.given:
            self.gradient = run.sum_of(self.gradient)


class Weight:
    """A parameter (no storage of its own here): its gradient is kept, or added to one that exists elsewhere.

    Attributes:
        elements, dtype: as kernels see it.
        shared: another layer's gradient is added before it is complete (tied embeddings).
        more: a third one's too, after this layer's.
        apart: the first that came is a view, that of `F.linear`'s `weight.t()`: it holds its base, so that the engine,
            which writes over what nobody else has, makes a third tensor of the sum (torch/csrc/autograd/
            input_buffer.cpp, can_accumulate_inplace; seen on torch 2.1 to 2.13). The allocator sees it; bytes are
            counted as the oracle's tracker does, which takes every sum to be in place.
    """

    __slots__ = ("apart", "dtype", "elements", "more", "shared")

    def __init__(self, elements: int, dtype: str, shared: bool = False, more: bool = False,
                 apart: bool = False) -> None:
        self.elements, self.dtype, self.shared, self.more, self.apart = elements, dtype, shared, more, apart

    def receive(self, run: Run, gradient: Storage) -> None:
        """Take a gradient; a shared parameter's is complete with the last."""
        if self.shared and run.pending and self.apart:
            gradient.hand_over()
            run.pending[0] = Storage(run.memory, rounded(self.elements, self.dtype), WORKSPACE)
        if self.shared and run.pending and self.more:
            return
        if self.shared and not run.pending:
            gradient.become(WORKSPACE)
            run.pending.append(gradient)
            return
        complete = run.pending.pop() if self.shared else gradient
        if run.keep_gradients:
            if run.widened:
                complete = Storage(run.memory, rounded(self.elements, run.widened), GRADIENTS)
            complete.become(GRADIENTS)
            run.gradients.append(complete)


class _StopError(Exception):
    """Recomputation has made the last saved tensor."""


class Frame:
    """One checkpointed call: nothing is saved in forward, everything when the first node of it runs backward.

    Attributes:
        selective: outputs of attention, of reduce-scatters and of every second product (the first, the third ...) are
            kept and not computed again.
        kept: those outputs, in order; products: how many products have run.
        parts: ranks that share the inputs; gathered: the whole ones, until the frame has run backward.
        outputs: storages of its outputs, where those are given up; last: its node that runs last in backward.
        returned: what a reentrant checkpoint's function returned again, until the frame has run backward.
    """

    def __init__(self, function: Callable[..., object], inputs: Sequence[Tensor], selective: bool = False,
                 parts: int = 1) -> None:
        self.function, self.parts = function, parts
        self.gathered: list[Tensor] = []
        self.selective = selective
        self.kept: list[Storage] = []
        self.products = 0
        self.inputs = [Tensor(t.storage, t.elements, t.dtype, t.sink) for t in inputs]
        self.saves = 0
        self.restored: list[Storage | None] = []
        self.outputs: list[Storage] = []
        self.last: Node | None = None
        self.returned: list[Tensor] = []
        self.done = False


class Run:
    """One layer running: its memory, its graph, and how PyTorch is set up.

    Attributes:
        autocast: dtype of autocast, "" without.
        keep_gradients: parameter gradients stay (else they are added to existing ones, or copied away, at once).
        pending: a tied table's gradient that waits for the other layer's.
        incoming: tensors of this layer that later layers read: the gradients those leave, (sink, elements, dtype).
        sums: gradients of such tensors of earlier layers that begin with this layer, which are there when it is done.
        outgoing: gradients of earlier layers' tensors that come to be around this layer's backward, (elements, dtype).
        early_stop: recomputation stops at the last saved tensor.
        compiled: what a graph keeps by policy and nothing reads in backward (a block's last product) is dropped.
        caches_casts: autocast keeps weight copies to the end of forward; it does so for leaves only, which FSDP 1's
            views of a flat parameter are not (ATen autocast_mode.cpp, cached_cast).
        widened: dtype a kept gradient is copied to when it is complete, "" = it stays as it came.
        reentrant: a checkpoint's backward is a function of its own, which runs backward inside (torch 2.3.1
            utils/checkpoint.py and megatron-core 0.8.0 tensor_parallel/random.py, CheckpointFunction.backward:
            `outputs`, `args`).
        given: the gradient that such a function holds while it runs, so that nothing can be added to it in place.
    """

    def __init__(self, autocast: str, keep_gradients: bool, early_stop: bool, caches_casts: bool = True,
                 compiled: bool = False, widened: str = "", reentrant: bool = False) -> None:
        self.memory, self.widened, self.reentrant = Memory(), widened, reentrant
        self.given: Storage | None = None
        self.last = "down"  # the operator with a block's last product
        self.autocast, self.keep_gradients, self.early_stop = autocast, keep_gradients, early_stop
        self.caches_casts, self.compiled = caches_casts, compiled
        self.kind = ACTIVATIONS
        self.nodes: list[Node] = []
        self.gradients: list[Storage] = []
        self.pending: list[Storage] = []
        self.incoming: list[tuple[Sink, int, str]] = []
        self.sums: list[Storage] = []
        self.outgoing: list[tuple[int, str]] = []
        self.cache: list[Storage] = []  # autocast's weight copies
        self.held: list[object] = []  # by the model's forward, until the head
        self.retained: list[object] = []  # until this layer's backward
        self.arriving: set[int] = set()  # storages that NCCL or ATen allocates, by number
        self.nameless: set[int] = set()  # of those, what a compiled graph has no name for
        self._saving: Frame | None = None
        self._restoring: Frame | None = None
        self._running: Node | None = None

    @property
    def checkpointed(self) -> bool:
        """Whether a checkpoint keeps nothing of what runs, or brings it back."""
        return self._saving is not None or self._restoring is not None

    # ------------------------------------------------------------------------------------------- making tensors
    def at(self, operator: str) -> None:
        """Name what follows."""
        self.memory.operator = operator

    def new(self, elements: int, dtype: str) -> Storage:
        """A storage of the current kind."""
        return Storage(self.memory, rounded(elements, dtype), self.kind)

    def arrived(self, elements: int, dtype: str, *, named: bool = True) -> Storage:
        """A storage that no compiled code allocates (`planned.py`)."""
        storage = self.new(elements, dtype)
        (self.arriving if named else self.nameless).add(storage.number)
        return storage

    def tensor(self, elements: int, dtype: str, sink: Sink | None = None) -> Tensor:
        """A tensor with a new storage."""
        return Tensor(self.new(elements, dtype), elements, dtype, sink)

    def sum_of(self, storage: Storage) -> Storage:
        """A gradient that somebody else has and another one, in a tensor of their own."""
        return Storage(self.memory, storage.size, WORKSPACE)

    def hold(self, storage: Storage, until_backward: bool) -> None:
        """Keep a storage that module code outside the layer holds. Recomputation does not hold it twice."""
        if self._restoring is None:
            (self.retained if until_backward else self.held).append(storage)

    def expect(self, sink: Sink, elements: int, dtype: str) -> None:
        """Later layers read a tensor of this one; the gradient they leave goes to `sink`."""
        if self._restoring is None:
            self.incoming.append((sink, elements, dtype))

    # ------------------------------------------------------------------------------------------- the graph
    def node(self, rule: Rule, inputs: Sequence[Sink | None], outputs: int = 1) -> Node:
        """A backward function; what it needs is saved with `save`."""
        kind = LOGITS if self.kind == LOGITS else WORKSPACE
        node = Node(rule, tuple(inputs), outputs, self.memory.operator, kind)
        if self._restoring is None and not node.idle:
            self.nodes.append(node)
        return node

    def save(self, node: Node, *storages: Storage) -> None:
        """Keep storages for a node's backward, or only note that a checkpoint has to bring them back."""
        for storage in () if node.idle else storages:
            if self._restoring is not None:
                self._restore(storage)
            elif self._saving is not None:
                node.frame = self._saving
                node.place.append(self._saving.saves)
                self._saving.saves += 1
            else:
                node.saved.append(storage)

    def output(self, elements: int, dtype: str, *, product: bool = False) -> Storage:
        """An output of attention, of a reduce-scatter or of a product, which selective recomputation may keep
        (torch.utils.checkpoint create_selective_checkpoint_contexts with torchtitan's policy)."""
        frame = self._saving or self._restoring
        if frame is None or not frame.selective:
            return self.new(elements, dtype)
        frame.products += product
        dead = self.compiled and self.memory.operator == self.last  # nothing reads a block's last output in backward
        keep = not dead and (not product or frame.products % 2 == 1)
        if keep and self._restoring is not None:
            return frame.kept.pop(0)
        storage = self.new(elements, dtype)
        if keep:
            frame.kept.append(storage)
        return storage

    def checkpoint(self, function: Callable[..., Tensor], *inputs: Tensor, selective: bool = False,
                   parts: int = 1) -> Tensor:
        """`torch.utils.checkpoint(function, *inputs, use_reentrant=False)`. Inside another one it changes nothing.

        Args:
            selective: see `output`.
            parts: ranks of which each keeps a part of the inputs, copied before the function runs (DeepSpeed
                runtime/activation_checkpointing/checkpointing.py, partition_activations).
        """
        if self._saving is not None or self._restoring is not None:
            return function(self, *inputs)
        frame = self._saving = Frame(function, inputs, selective, parts)
        if parts > 1:
            frame.inputs = [self.tensor(x.elements // parts, x.dtype, x.sink) for x in inputs]
        output = function(self, *inputs)
        self._saving = None
        return output

    def without_output(self, function: Callable[..., Sequence[Tensor]], *inputs: Tensor,
                       ) -> tuple[Sequence[Tensor], Frame | None]:
        """A checkpoint of what the next layer alone reads: `discard` gives its outputs up once that has run. Inside
        another checkpoint it changes nothing, and there is no frame."""
        if self._saving is not None or self._restoring is not None:
            return function(self, *inputs), None
        start, frame = len(self.nodes), Frame(function, inputs)
        self._saving = frame
        outputs = function(self, *inputs)
        self._saving = None
        if len(self.nodes) == start:
            return outputs, None
        frame.last, frame.outputs = self.nodes[start], [t.storage for t in outputs]
        return outputs, frame

    def discard(self, frame: Frame | None, hook: Tensor) -> None:
        """Give a frame's outputs up until the gradient of `hook`, which was made of them, is there."""
        if frame is None or not isinstance(hook.sink, Output):
            return
        for storage in frame.outputs:
            storage.give_up()
        hook.sink.node.wakes.append(frame)

    def _restore(self, storage: Storage) -> None:
        frame = self._restoring
        assert frame is not None
        frame.restored.append(storage)
        if self.early_stop and not frame.outputs and len(frame.restored) == frame.saves:
            raise _StopError

    def _recompute(self, frame: Frame) -> None:
        """Run the frame's function again; its graph is thrown away, what it saved goes to the first run's nodes."""
        frame.done, frame.products = True, 0
        self._restoring, kind, operator, cache = frame, self.kind, self.memory.operator, self.cache
        self.kind, self.cache = ACTIVATIONS, []
        frame.gathered = [self.tensor(x.elements * frame.parts, x.dtype, x.sink) for x in frame.inputs
                          ] if frame.parts > 1 else frame.inputs
        with suppress(_StopError):
            outputs = frame.function(self, *frame.gathered)
            if self.reentrant and isinstance(outputs, Tensor) and not frame.outputs:
                frame.returned.append(outputs)
            self._woken(frame, outputs)
        self._restoring, self.kind, self.memory.operator, self.cache = None, kind, operator, cache

    def _woken(self, frame: Frame, outputs: Any) -> None:
        """Outputs that were given up are copied from new ones, which stay until the frame has run backward."""
        if frame.outputs and frame.last is not None:
            for storage in frame.outputs:
                storage.fill()
            frame.last.saved += [t.storage for t in outputs]
            frame.outputs, frame.last = [], None  # nothing but references counts what is alive: no circle may be left

    def backward(self) -> None:
        """Run every node that has a gradient, the youngest first."""
        while self.nodes:
            node = self.nodes.pop()
            if all(g is None for g in node.gradients):
                continue
            for frame in node.wakes:
                self._recompute(frame)
            node.wakes = []
            if node.frame is not None:
                self._unpack(node)
            self.kind, self.memory.operator = node.kind, node.operator
            self._execute(node)
        self.kind = ACTIVATIONS

    def _unpack(self, node: Node) -> None:
        frame = node.frame
        assert frame is not None
        if not frame.done:
            self._recompute(frame)
        for place in node.place:
            storage = frame.restored[place]
            assert storage is not None
            node.saved.append(storage)
            frame.restored[place] = None

    def function_returned(self) -> None:
        """The running node's function is done; what follows is the engine's (validate_outputs: sums and casts to an
        input's shape and dtype). What a checkpoint brought back was handed to the function and goes with it; other
        saved tensors are the node's own and stay until the engine has its results."""
        if self._running is not None and self._running.frame is not None:
            self._running.saved.clear()

    def overwritten(self) -> list[Storage]:
        """What the running node saved, for gradients to be written over it."""
        assert self._running is not None
        for storage in self._running.saved:
            storage.become(self.kind)
        return list(self._running.saved)

    def _execute(self, node: Node) -> None:
        gradients, node.gradients, self._running = node.gradients, [], node
        results = list(node.rule(self, gradients))
        self._running = None
        gradients.clear()
        node.saved.clear()
        for index, sink in enumerate(node.sinks):
            result, results[index] = results[index], None
            if sink is not None and result is not None:
                sink.receive(self, result)
