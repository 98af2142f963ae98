"""A scenario as text: its lines and values, errors that name them, and what other tools call what it says."""
