"""What can be measured: each file has ``measure(rounds)``, which gives its comparisons."""
