"""GPT-2: one list of layers, and the two ways DeepSpeed's engines run it."""
