"""One page about a run: what it keeps for it, how that is read, drawn and written."""
