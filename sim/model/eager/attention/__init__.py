"""Attention, tensor by tensor: as modules run it, its core, and what passes between ranks around it."""
