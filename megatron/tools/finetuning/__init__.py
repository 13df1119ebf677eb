"""Fine-tuning: classification of rows of text after pretraining."""
