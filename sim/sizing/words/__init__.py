"""What a search or a comparison found, in words, tables and pictures."""
