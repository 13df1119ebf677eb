"""Audits the samples that a run was trained on, from its checkpoint, metrics and data. No torch here."""
