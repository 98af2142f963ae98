"""Kernel tables, fits of figures to them, and what `drystep kernel` and `drystep calibrate --gemm` do."""
