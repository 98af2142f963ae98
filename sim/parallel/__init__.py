"""Techniques of parallel training: the only room that knows what FSDP or DDP is. Entry point: `lower`."""

from sim.parallel.lower import Lowered, lower

__all__ = ["Lowered", "lower"]
