"""What fields together must say, and the errors where they do not."""
