"""Techniques that cut the model itself: tensor, sequence, context and expert parallelism."""
