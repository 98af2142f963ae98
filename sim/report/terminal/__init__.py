"""What a person reads in a terminal. Knows rich; import it when something is printed, not before."""
