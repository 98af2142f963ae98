"""A request of inference as a Program."""
