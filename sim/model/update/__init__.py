"""What an optimizer step computes."""
