"""What is searched: layouts of training steps, ways to serve requests, and how each becomes a scenario."""
