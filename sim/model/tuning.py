"""Fine-tuning of small matrices beside frozen weights: what is trained, and how the frozen rest is stored.

Sources: LoRA: Hu et al. 2021 (arXiv 2106.09685); QLoRA: Dettmers et al. 2023 (arXiv 2305.14314), section 3; adapters:
Houlsby et al. 2019 (arXiv 1902.00751), section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sim.work import DTYPE_BYTES

#: Elements that share one constant in 4-bit storage, and 4-bit constants that share one in double quantisation
#: (QLoRA, section 3: blocks of 64 with fp32 absmax = 0.5 bit a weight; 8-bit constants in blocks of 256 = 0.127 bit).
BLOCK, BLOCKS_OF_CONSTANTS = 64, 256
_FOUR_BIT = ("int4", "nf4", "nf4-dq")
QUANTISED = ("int8", *_FOUR_BIT)
#: Matrices a scenario can name, in the order in which a block uses them.
TARGETS = ("query", "key", "value", "projection", "mlp", "head")


@dataclass(frozen=True, slots=True)
class Frozen:
    """A tensor that is not trained.

    Attributes:
        shape: as the module has it, (out, in).
        dtype: how it is stored: a dtype of `DTYPE_BYTES`, or nf4-dq.
        routed: of an expert that tokens are routed to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    routed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes of each tensor behind it: the weight and its constants."""
        return stored(self.numel, self.shape[0], self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes, without allocator rounding."""
        return sum(self.pieces)

    def parameter(self, constants_apart: bool) -> tuple[int, ...]:
        """Bytes of each tensor of it that is a parameter, or part of one.

        Args:
            constants_apart: a quantised weight's constants are none (`Stack.constants_apart`).
        """
        return self.pieces[:1] if constants_apart else self.pieces

    def beside(self, constants_apart: bool) -> tuple[int, ...]:
        """Bytes of each tensor of it that is none."""
        return self.pieces[1:] if constants_apart else ()


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is trained.

    Attributes:
        method: lora (small matrices beside a linear layer) or adapter (a bottleneck behind a sub-layer).
        rank: of LoRA's matrices, or width of the bottleneck.
        targets: of `TARGETS`; a bottleneck sits behind attention if one of its four matrices is a target, and behind
            the feed-forward part if `mlp` is.
        base: how the frozen linear layers are stored.
        plain: dtype of what is frozen but not quantised (embeddings, norms, biases; a head that is left out).
        dtype: of what is trained.
        quantised_head: the head is stored like the other linear layers.
        trains_norms: the norms are trained too, as they are beside Houlsby's adapters (section 2.1).
        plain_down: the feed-forward part's last layer is never quantised.
        drops: LoRA's matrices read their input through dropout.
        gemm: dtype of the tensor cores for products with what is trained.
    """

    method: str
    rank: int
    targets: tuple[str, ...]
    base: str
    plain: str
    dtype: str
    quantised_head: bool
    trains_norms: bool = False
    plain_down: bool = False
    drops: bool = True
    gemm: str = ""

    @property
    def quantised(self) -> bool:
        """Whether the linear layers have to be dequantised before they are used."""
        return self.base in QUANTISED

    def linear_dtype(self, target: str, operator: str = "") -> str:
        """How the weight of a target's linear layer is stored.

        Args:
            operator: the model's, where a target has several.
        """
        left = (target == "head" and not self.quantised_head) or (operator == "down" and self.plain_down)
        return self.plain if left else self.base

    def chosen(self, parts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        """Parts of a linear layer, outputs by target, that have LoRA's matrices beside them."""
        return tuple(part for part in parts if part[0] in self.targets) if self.method == "lora" else ()

    def behind(self, sublayer: str) -> bool:
        """Whether a bottleneck sits behind "attention", "cross" (attention to an encoder's output) or "mlp"."""
        if self.method != "adapter":
            return False
        return "mlp" in self.targets if sublayer == "mlp" else any(t in self.targets for t in TARGETS[:4])


def tuned_of(training: Any, quantises_head: bool, own_norms: bool = False, plain_down: bool = False,
             drops: bool = True, seen: str = "") -> Tuned | None:
    """What a scenario's `training.finetune` trains; None = everything.

    A base of 16 or 32 bits holds every frozen tensor. Beside a quantised base, what is not quantised has the dtype that
    the scenario says, else that of the trained parameters: fp32 under autocast, which is what peft's
    `prepare_model_for_kbit_training` casts it to.

    Args:
        quantises_head: Lightning's BitsandbytesPrecision replaces every linear layer; transformers leaves the head
            (`get_keys_to_not_convert`); a loss in chunks reads the head's weight itself, as it is.
        own_norms: adapters bring norms of their own and leave the model's frozen (`bottlenecks.py`).
        plain_down: quantisation leaves out what transformers keeps wide, T5's `wo` (modeling_t5.py,
            `_keep_in_fp32_modules`; quantizers/base.py, get_modules_to_not_convert).
        drops: LoRA's matrices read their input through dropout where the scenario does not say.
        seen: dtype in which modules see what is trained, where they are gathered in another than they are kept in.
    """
    finetune = training.finetune
    if finetune is None or finetune.method == "full":
        return None
    kept = str(training.precision.parameters)
    plain = str(finetune.unquantised or kept) if finetune.base in QUANTISED else str(finetune.base)
    method = "adapter" if finetune.method == "adapter" else "lora"
    targets = tuple(t for t in TARGETS if t in finetune.targets)
    return Tuned(method, finetune.rank, targets, str(finetune.base), plain, seen or kept, quantises_head,
                 method == "adapter" and not own_norms, plain_down and finetune.base in QUANTISED,
                 drops if finetune.dropout is None else finetune.dropout > 0, str(training.precision.compute))


def cut_both(tensor: int, scattered: bool, modules: str) -> bool:
    """Whether branches of a model in `tensor` slices have both matrices cut, as Megatron's (`branches.py`).

    Args:
        scattered: activations between cut regions are cut along the sequence, which only Megatron's branches know.
    """
    return tensor > 1 and (scattered or modules == "megatron")


def stored(elements: int, rows: int, dtype: str) -> tuple[int, ...]:
    """Bytes of each tensor that holds `elements` weights in `rows` rows: packed weights, then constants.

    int8 keeps an fp32 scale per row (bitsandbytes `Int8Params.SCB`); double quantisation 8-bit constants, an fp32
    absmax per 256 of them, and their mean (bitsandbytes `quantize_4bit`, compress_statistics).
    """
    if dtype == "int8":
        return elements, 4 * rows
    if dtype not in _FOUR_BIT:
        return (math.ceil(elements * DTYPE_BYTES[dtype]),)
    constants = math.ceil(elements / BLOCK)
    packed = math.ceil(elements / 2)
    if dtype != "nf4-dq":
        return packed, 4 * constants
    return packed, constants, 4 * math.ceil(constants / BLOCKS_OF_CONSTANTS), 4


def stored_width(dtype: str) -> float:
    """Bytes read per weight when a weight stored in `dtype` is used, constants included."""
    if dtype not in _FOUR_BIT:
        return DTYPE_BYTES[dtype]
    constant = 4.0 if dtype != "nf4-dq" else 1.0 + 4.0 / BLOCKS_OF_CONSTANTS
    return 0.5 + constant / BLOCK
