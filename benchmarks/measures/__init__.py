"""The benchmarks: each module has ``measure(rounds)``, which returns its results."""
