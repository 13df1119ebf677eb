"""How ranks share the work: the layout, and a package for each axis of parallelism."""
