"""Memory of layers, tensor by tensor: a miniature of PyTorch's eager autograd."""

from sim.model.eager.autograd import KINDS
from sim.model.eager.profile import NOTHING, Levels, Pass, Profile, Program, profile

__all__ = ["KINDS", "NOTHING", "Levels", "Pass", "Profile", "Program", "profile"]
