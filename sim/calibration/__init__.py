"""Fits of the machine models to measurements, the script that measures, and the reports of how good they are."""
