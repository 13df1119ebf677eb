"""One rank of a run of any size, alone in its process: its program runs unmodified, and no other rank is there."""
