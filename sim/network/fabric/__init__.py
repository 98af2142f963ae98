"""What carries the bytes: a cluster as a template, its links and their trouble, routes and rates on them."""
