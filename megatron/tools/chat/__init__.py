"""Chat templates: conversations as the text that a model is trained on and asked with."""
