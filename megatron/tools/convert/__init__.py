"""Weights in one piece, whoever wrote them, and the formats that others read."""
