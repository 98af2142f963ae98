"""What a validation found, for people: its tables, reasons for misses, pictures, the terminal."""
