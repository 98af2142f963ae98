"""Hugging Face's configurations as models."""
