"""How a space is searched: rows by their bounds, the best first; where they are simulated and what is kept."""
