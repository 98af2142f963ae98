"""NCCL sweeps, the fit of figures to them, and what `drystep collective` and `drystep calibrate --nccl` do."""
