"""Attention: projections, which core runs, how it is cut, what pairs of tokens meet."""
