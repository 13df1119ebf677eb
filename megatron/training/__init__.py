"""The training run: engines, data iterators, loop, metrics and callbacks."""
