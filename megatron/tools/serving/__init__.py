"""A model behind HTTP: requests, one queue, one generator."""
