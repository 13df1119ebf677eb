"""GPT-2, the Llama family, BERT and T5: a list of layers each, and the two ways DeepSpeed's engines run it."""
