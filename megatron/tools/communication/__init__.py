"""Deadlock check of a run: records the communication of every rank, run one by one, and simulates it."""
