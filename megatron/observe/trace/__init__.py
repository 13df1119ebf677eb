"""Timelines of what ranks do: recorded in a run, kept as JSON for Perfetto, measured, drawn."""
