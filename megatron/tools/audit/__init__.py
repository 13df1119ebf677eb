"""What a run was trained on, told from its checkpoint, its metrics and its data. No torch here."""
