"""What the user is warned of: asked for in words, and not what will be run."""
