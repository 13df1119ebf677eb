"""Checkpoints and snapshots: saving, loading, resharding, and the files on disk."""
