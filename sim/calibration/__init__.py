"""Fits of the machine models to micro-measurements (never to step times), the script that measures, and reports.

What is run stands here; `kernels/` and `nccl/` are what it is made of, and what `drystep kernel`, `collective` and
`calibrate` do with them; `data/` are the measurements.
"""
