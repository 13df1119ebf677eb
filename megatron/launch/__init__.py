"""From a started process to a rank of the run: what its launcher and its host say, and what has to be ready."""
