"""Chat templates, which render conversations as text for training and for prompts."""
