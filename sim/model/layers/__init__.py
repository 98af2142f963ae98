"""Layers beside attention: norms, residuals, embeddings, MLPs, experts, heads and their losses."""
