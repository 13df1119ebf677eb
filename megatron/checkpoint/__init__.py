"""What a run leaves on disk and continues from."""
