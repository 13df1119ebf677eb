"""Rehearse single ranks of a large run on one device."""
