"""`drystep fit`: free figures of software profiles estimated on published step times, and judged on others."""
