"""Keys of DeepSpeed configs that are refused, each with the reason and what to do."""

_GONE = "DeepSpeed no longer has it: remove it"
_WRITER = "checkpoints have a writer of their own: remove it; --async-save writes while training goes on"

REFUSED_KEYS: dict[str, str] = {
    "scheduler": "the schedule belongs to the command line: use --lr, --min-lr, --lr-decay-style, --lr-decay-iters "
    "and --warmup",
    "bfloat16": 'the old name of "bf16": rename it',
    "tensor_parallel": "the model cuts its own layers: use --model-parallel-size",
    "sequence_parallel_size": "it belongs to the command line: use --ds-sequence-parallel-size",
    "expert_parallel": "the model has no experts: remove it",
    "data_efficiency": "pretrain_gpt2.py reads its own data: remove it",
    "hybrid_engine": "it serves generation during training, which pretrain_gpt2.py does not do: remove it",
    "weight_quantization": "it serves inference: remove it",
    "autotuning": "not supported by pretrain_gpt2.py: remove it",
    "amp": 'DeepSpeed no longer has it: use "fp16" or "bf16"',
    "nebula": _GONE,
    "compression_training": _GONE,
    "quantize_training": _GONE,
    "sparse_gradients": _GONE,
    "eigenvalue": _GONE,
    "sparse_attention": _GONE,
    "elasticity": _GONE,
    "graph_harvesting": _GONE,
    "curriculum_learning": _GONE,
    "progressive_layer_drop": _GONE,
    "zero_optimization.cpu_offload": 'outdated: write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'outdated: write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": 'outdated: write "pin_memory" inside "offload_optimizer"',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": 'outdated: write "stage3_gather_16bit_weights_on'
    '_model_save"',
    "zero_optimization.mics_shard_size": _GONE,
    "zero_optimization.mics_hierarchical_params_gather": _GONE,
    "zero_optimization.zeropp_loco_param": _GONE,
    "optimizer.params.max_grad_norm": 'DeepSpeed does not support it: use "gradient_clipping" or --clip-grad',
    "checkpoint.writer": _WRITER,
    "checkpoint.checkpoint_serialization": _WRITER,
    "checkpoint.use_node_local_storage": "a checkpoint is whole in one place: remove it, and name a folder that all "
    "hosts share with --save",
    "datastates_ckpt": _WRITER,
    "pipeline.stages": "the stages belong to the command line: use --pipe-parallel-size",
    "pipeline.partition": "the model says how it is cut into stages: remove it",
    "pipeline.seed_layers": "the model seeds its own layers: remove it",
    "pipeline.activation_checkpoint_interval": "use --checkpoint-activations and --checkpoint-num-layers",
}
"""Path of the key, with dots, to the reason."""
