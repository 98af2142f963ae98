"""Megatron's Muon: --optimizer muon or dist_muon, and the arguments beside it.

Names and defaults: megatron-core 0.16.1 optimizer/optimizer_config.py (muon_*), optimizer/muon.py; arguments.py of
Megatron-LM (recalled), which turns dist_muon into the layer-wise optimizer.
"""

from __future__ import annotations

from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args
from sim.imports.megatron.model import choice
from sim.imports.settings import Said

#: --optimizer of the two.
NAMES = ("muon", "dist_muon")
_MODES = {mode: mode for mode in ("blockwise", "duplicated", "distributed")}


def read_muon(args: Args, draft: Draft, said: Said) -> None:
    """Muon on whole matrices; dist_muon deals whole parameters out to the data ranks.

    Raises:
        UserError: Megatron refuses the distributed optimizer beside it.
    """
    if args.on("use_distributed_optimizer"):
        raise said.wrong("adam: Megatron refuses --use-distributed-optimizer beside Muon (dist_muon has a way of its "
                         "own)")
    draft.take("training.optimizer", "muon", said)
    if said.word() == "dist_muon":
        draft.take("parallel.strategy", "zero1", said, "the layer-wise optimizer: whole parameters for each rank")
    if steps := args.get("muon_num_ns_steps"):
        draft.take("training.muon.ns_steps", steps.whole(), steps)
    if mode := args.get("muon_tp_mode"):
        draft.take("training.muon.tensor", choice(mode, _MODES), mode)
    if nesterov := args.on("muon_use_nesterov"):
        draft.take("training.muon.nesterov", True, nesterov)
    if whole := args.off("muon_split_qkv", "muon_no_split_qkv", "no_muon_split_qkv"):
        draft.take("training.muon.split_qkv", False, whole)
    products = args.get("muon_fp32_matmul_prec")
    if products is not None and products.word() != "medium":
        draft.leave(products, "products are simulated in bf16, as \"medium\" has them")
