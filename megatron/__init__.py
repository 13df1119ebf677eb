"""3D-parallel GPT training on DeepSpeed: tensor, pipeline and data parallelism from one command line."""
