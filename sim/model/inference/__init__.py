"""Forward passes of inference: kernels, cache and weights of one slice of a model."""
