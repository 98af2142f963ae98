"""One case: read from its file, predicted, and held against what was measured, step, kernel, collective or tensor."""
