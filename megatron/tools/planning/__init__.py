"""Which layout fits: memory, traffic and time of a run, by arithmetic alone. No torch here."""
