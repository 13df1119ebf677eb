"""Whether layouts compute the same: their names, their runs, and what comes out of them beside each other."""
