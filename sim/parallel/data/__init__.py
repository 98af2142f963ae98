"""Techniques that keep whole parameters on every rank: DDP, ZeRO-1 and 2, Megatron's distributed optimizer."""
