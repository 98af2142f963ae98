"""Fits of the catalogues to micro-measurements, never to step times."""
