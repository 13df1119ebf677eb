"""Model architectures (GPT-2 and Llama, BERT, T5, LLaVA): lists of layers, and the torch modules of the layers."""
