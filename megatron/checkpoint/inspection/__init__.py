"""What a checkpoint is, whether it is whole, and how it differs from another."""
