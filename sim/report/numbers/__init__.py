"""Numbers read off one simulated step: where the time goes, memory, traffic, the whole run, the record of errors."""
