"""Converts checkpoints: universal, merged and resharded ones, Hugging Face folders, and files of other Megatrons."""
