"""Checks that layouts compute the same: trains the same model on each of them and compares what they computed."""
