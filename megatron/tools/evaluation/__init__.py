"""How well a model predicts text."""
