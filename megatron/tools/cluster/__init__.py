"""Several hosts: which they are, how they are reached, and whether they are ready."""
