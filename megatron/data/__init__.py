"""The data pipeline: indexed data sets of tokens, the order of samples, and the loader of micro-batches."""
