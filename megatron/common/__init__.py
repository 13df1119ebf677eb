"""Helpers for all packages: errors, environment variables, files and processes. No torch here."""
