"""What can be asked but is not simulated: one clear error, never a silent approximation."""
