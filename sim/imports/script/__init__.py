"""Launch scripts, followed and never run: what they would call, with what arguments."""
