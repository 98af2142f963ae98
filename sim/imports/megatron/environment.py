"""Variables that a launch script exports (`script.shell.TELLING`): NCCL's, CUDA's and TransformerEngine's.

Sources: NCCL's user guide, "Environment Variables" (NCCL_ALGO, NCCL_PROTO, NCCL_MIN_NCHANNELS and the switches of
transports); TransformerEngine 2.8.0 pytorch/attention/dot_product_attention/utils.py, get_attention_backend
(NVTE_FLASH_ATTN, NVTE_FUSED_ATTN); CUDA's programming guide (CUDA_LAUNCH_BLOCKING).
"""

from __future__ import annotations

from sim.imports.allocator import VARIABLES, read_conf
from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args
from sim.imports.settings import Said

_ALGORITHMS = {"ring": "ring", "tree": "tree", "collnetdirect": "collnet", "collnetchain": "collnet",
               "collnet": "collnet", "nvls": "nvls", "nvlstree": "nvls-tree"}
_PROTOCOLS = {"simple": "simple", "ll": "ll", "ll128": "ll128"}
_CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
_LINKS = "links are counted as the cluster has them: --set cluster.topology says others"
#: Variable -> the value that changes nothing, and what else is not simulated.
_OTHER_THAN = {
    "CUDA_LAUNCH_BLOCKING": ("0", "launches that wait for their kernels are not simulated"),
    "NCCL_P2P_DISABLE": ("0", _LINKS), "NCCL_IB_DISABLE": ("0", _LINKS), "NCCL_SHM_DISABLE": ("0", _LINKS),
    "NCCL_NVLS_ENABLE": ("1", "NCCL chooses among all its algorithms here: --set software.nccl.algorithm forces one"),
}
_KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")


def read_environment(args: Args, draft: Draft) -> None:
    """Takes what variables say. Raises UserError."""
    if said := args.get("CUDA_DEVICE_MAX_CONNECTIONS"):
        draft.take("software.max_connections", said.whole(), said)
    if said := args.get(*VARIABLES):
        read_conf(said, draft)
    for name, path, known in (("NCCL_ALGO", "algorithm", _ALGORITHMS), ("NCCL_PROTO", "protocol", _PROTOCOLS)):
        said = args.get(name)
        if said is None or not str(said.value).strip():
            continue
        if (one := known.get(str(said.value).strip().lower())) is not None:
            draft.take(f"software.nccl.{path}", one, said)
        else:
            draft.leave(said, f"several {path}s, or those of single collectives: NCCL chooses among all of them here")
    _channels(args, draft)
    for name, (usual, why) in _OTHER_THAN.items():
        if (said := args.get(name)) is not None and str(said.value).strip() != usual:
            draft.leave(said, why)


def unfused(args: Args) -> Said | None:
    """The variable with which TransformerEngine is left without a fused kernel of attention: both switched off."""
    found = [args.get(name) for name in _KERNELS]
    off = [said for said in found if said is not None and str(said.value).strip() == "0"]
    return off[0] if len(off) == len(_KERNELS) else None


def _channels(args: Args, draft: Draft) -> None:
    """A number of channels where the least and the most are one; a bound alone is left."""
    least, most = args.get(*_CHANNELS[::2]), args.get(*_CHANNELS[1::2])
    if least is not None and most is not None and least.value == most.value:
        draft.take("software.nccl.channels", least.whole(), least)
        return
    for said in (least, most):
        if said is not None:
            draft.leave(said, "a bound of channels is not simulated; --set software.nccl.channels=N says their number")
