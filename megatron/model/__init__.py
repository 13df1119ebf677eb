"""GPT-2 and BERT: a list of layers each, and the two ways DeepSpeed's engines run it."""
