"""Memory of layers, tensor by tensor: a miniature of PyTorch's eager autograd."""

from __future__ import annotations

from sim.model.architecture import Layer
from sim.model.eager.estimate import estimate
from sim.model.eager.profile import NOTHING, Levels, Pass, Profile, profile
from sim.model.eager.shared_buffer import shared_buffer
from sim.model.eager.tensors.storage import KINDS, rounded

__all__ = ["KINDS", "NOTHING", "Levels", "Pass", "Profile", "layer_profile", "profile", "rounded",
           "shared_buffer"]


def layer_profile(layer: Layer, policy: str, keep_gradients: bool, caches_casts: bool = True) -> Profile:
    """Memory of a layer: its program's where it has one, else an estimate from what its operators save.

    Args:
        policy: recomputation: none, full, selective or selective-op. For an embedding: that of the blocks.
        keep_gradients: parameter gradients stay as new tensors; else they are added to existing ones or copied away.
        caches_casts: autocast's weight copies live to the end of forward.
    """
    if layer.program is not None:
        return profile(layer.program, policy, keep_gradients, caches_casts)
    return estimate(layer, policy, keep_gradients)
