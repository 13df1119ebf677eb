"""The check and measurement of a machine with GPUs that ``benchmarks/gpu.sh`` starts."""
