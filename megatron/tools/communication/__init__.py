"""The communication of every rank of a run, extracted rank by rank, and the proof that no rank can wait forever."""
