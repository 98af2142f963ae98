"""Pipeline parallelism: stages of a model, order lists of their micro-batches, transfers between them."""
