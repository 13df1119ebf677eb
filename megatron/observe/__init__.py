"""What the ranks of a run know of each other while it goes on: who hangs, and who is gone."""
