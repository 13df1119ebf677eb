"""From text on disk to batches of tokens: the indexed data set, the order of samples, the loader."""
