"""Rehearsals: runs single ranks of a large run on one device, and estimates the step time of the run."""
