"""Megatron-LM's arguments, wherever they stand, as fields of a scenario."""
