"""What would make a job fit, and what each change costs."""
