"""Fits of the machine models to micro-measurements (never to step times), the script that measures, and reports."""
