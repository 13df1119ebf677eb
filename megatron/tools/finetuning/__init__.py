"""Fine-tuning of BERT for text classification, such as GLUE."""
