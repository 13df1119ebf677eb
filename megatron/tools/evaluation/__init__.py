"""Evaluation of language models: perplexity, LAMBADA, questions about images, and lm-eval."""
