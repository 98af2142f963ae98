"""Lower bounds of memory and time, from tables of layers, collectives alone and order lists."""
