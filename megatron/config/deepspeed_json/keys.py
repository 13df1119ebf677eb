"""The keys of a DeepSpeed 0.19.8 config, with the values they take. No DeepSpeed here: this is what it is checked with.

A section is a dict, a setting is a Kind. Keys that DeepSpeed knows but that would fight with this
program, or that it has given up, are in REFUSED_KEYS with the reason.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias


class Kind(NamedTuple):
    """What a setting may be: in words, for messages, and as a test of a JSON value."""

    words: str
    accepts: Callable[[Any], bool]


Keys: TypeAlias = Mapping[str, "Kind | Keys"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    # 5e8 is a usual way to write a bucket size, and DeepSpeed reads it as an integer.
    return _is_number(value) and value == int(value)


def _one_of(*values: str) -> Kind:
    return Kind(f"one of {', '.join(values)}", lambda value: value in values)


BOOL = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number from 1 on", lambda value: _is_whole(value) and value >= 1)
SIZE = Kind("a whole number from 0 on", lambda value: _is_whole(value) and value >= 0)
WHOLE = Kind("a whole number", _is_whole)
AMOUNT = Kind("a number from 0 on", lambda value: _is_number(value) and value >= 0)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value)
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
STAGE = Kind("one of 0, 1, 2, 3", lambda value: _is_whole(value) and 0 <= value <= 3)
INTEGERS = (COUNT, SIZE, WHOLE, STAGE)
"""The kinds of which DeepSpeed wants an integer, whatever JSON writes."""
BETAS = Kind(
    "a list of two numbers from 0 to 1, 1 excluded",
    lambda value: isinstance(value, list) and len(value) == 2 and all(SHARE.accepts(b) and b < 1 for b in value),
)
_DTYPE = _one_of("fp32", "fp16", "bf16")


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.accepts(value))


_FP16: Keys = {
    "enabled": BOOL,
    "auto_cast": BOOL,
    "loss_scale": AMOUNT,
    "initial_scale_power": SIZE,
    "loss_scale_window": COUNT,
    "hysteresis": COUNT,
    "consecutive_hysteresis": BOOL,
    "min_loss_scale": COUNT,
    "fp16_master_weights_and_grads": BOOL,
}
_BF16: Keys = {
    "enabled": BOOL,
    "immediate_grad_update": BOOL,
    "check_grad_overflow": BOOL,
    "bf16_master_weights_and_grads": BOOL,
    "bf16_optimizer_states": BOOL,
}
_OFFLOAD_PARAM: Keys = {
    "device": _one_of("none", "cpu", "nvme"),
    "nvme_path": _or_null(TEXT),
    "buffer_count": SIZE,
    "buffer_size": SIZE,
    "max_in_cpu": SIZE,
    "pin_memory": BOOL,
}
_OFFLOAD_OPTIMIZER: Keys = {
    "device": _one_of("none", "cpu", "nvme"),
    "nvme_path": _or_null(TEXT),
    "buffer_count": SIZE,
    "pin_memory": BOOL,
    "pipeline_read": BOOL,
    "pipeline_write": BOOL,
    "fast_init": BOOL,
    "ratio": SHARE,
    "super_offload": BOOL,
    "cpuadam_cores_perc": SHARE,
}
# Both names of a stage-3 setting are DeepSpeed's: one is the field, the other its alias.
_STAGE3: dict[str, Kind] = {
    "prefetch_bucket_size": SIZE,
    "param_persistence_threshold": SIZE,
    "model_persistence_threshold": SIZE,
    "max_live_parameters": SIZE,
    "max_reuse_distance": SIZE,
    "gather_16bit_weights_on_model_save": BOOL,
    "module_granularity_threshold": WHOLE,
    "use_all_reduce_for_fetch_params": BOOL,
    "allgather_sequential": BOOL,
}
_ZERO: Keys = {
    "stage": STAGE,
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": COUNT,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": SIZE,
    "overlap_comm": _or_null(BOOL),
    "compute_grad_norm": BOOL,
    "load_from_fp32_weights": BOOL,
    "elastic_checkpoint": BOOL,
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": OBJECT,
    "sub_group_size": SIZE,
    **_STAGE3,
    **{f"stage3_{name}": kind for name, kind in _STAGE3.items()},
    "ignore_unused_parameters": BOOL,
    "legacy_stage1": BOOL,
    "round_robin_gradients": BOOL,
    "parameter_alignment": BOOL,
    "zero_hpz_partition_size": SIZE,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "memory_efficient_linear": BOOL,
    "pipeline_loading_checkpoint": BOOL,
    "override_module_apply": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
    "save_muon_momentum_buffer_in_memory": BOOL,
    "leaf_module": OBJECT,
}
_CHECKPOINTING: Keys = {
    "partition_activations": BOOL,
    "contiguous_memory_optimization": BOOL,
    "cpu_checkpointing": BOOL,
    "number_checkpoints": _or_null(COUNT),
    "synchronize_checkpoint_boundary": BOOL,
    "profile": BOOL,
}
_OPTIMIZER: Keys = {"type": TEXT, "params": OBJECT, "legacy_fusion": BOOL}
_PIPELINE: Keys = {"pipe_partitioned": BOOL, "grad_partitioned": BOOL, "use_reentrant": BOOL}
_FLOPS_PROFILER: Keys = {
    "enabled": BOOL,
    "recompute_fwd_factor": AMOUNT,
    "profile_step": COUNT,
    "module_depth": WHOLE,
    "top_modules": COUNT,
    "detailed": BOOL,
    "output_file": _or_null(TEXT),
}
_CHECKPOINT: Keys = {
    "tag_validation": Kind(
        "one of Ignore, Warn, Fail",
        lambda value: isinstance(value, str) and value.upper() in ("IGNORE", "WARN", "FAIL"),
    ),
    "load_universal": BOOL,
    "parallel_write": {"pipeline_stage": BOOL},
}

TOP_KEYS: Keys = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "managed_gradient_accumulation": BOOL,
    "gradient_clipping": AMOUNT,
    "optimizer": _OPTIMIZER,
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {"enabled": BOOL, "dtype": TEXT, "lower_precision_safe_modules": TEXTS},
    "data_types": {
        "grad_accum_dtype": _or_null(_DTYPE),
        "param_dtype": _or_null(TEXT),
        "buffer_dtype": _or_null(TEXT),
        "keep_in_fp32_modules": Kind(
            '"auto" or a list of texts', lambda value: value == "auto" or TEXTS.accepts(value)
        ),
    },
    "communication_data_type": _or_null(_DTYPE),
    "seq_parallel_communication_data_type": _or_null(_DTYPE),
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": AMOUNT,
    "gradient_allreduce_op": _one_of("mean", "sum"),
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
    "activation_checkpointing": _CHECKPOINTING,
    "pipeline": _PIPELINE,
    "checkpoint": _CHECKPOINT,
    "aio": {
        "block_size": COUNT,
        "queue_depth": COUNT,
        "intra_op_parallelism": COUNT,
        "single_submit": BOOL,
        "overlap_events": BOOL,
        "use_gds": BOOL,
    },
    "compile": OBJECT,
    "comms_logger": {"enabled": BOOL, "prof_all": BOOL, "prof_ops": TEXTS, "verbose": BOOL, "debug": BOOL},
    "flops_profiler": _FLOPS_PROFILER,
    "tensorboard": {"enabled": BOOL, "output_path": TEXT, "job_name": TEXT},
    "wandb": {"enabled": BOOL, "group": _or_null(TEXT), "team": _or_null(TEXT), "project": TEXT},
    "csv_monitor": {"enabled": BOOL, "output_path": TEXT, "job_name": TEXT},
    "comet": OBJECT,
    "timers": {"throughput": {"enabled": BOOL, "synchronized": BOOL}},
    "steps_per_print": _or_null(COUNT),
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
    "log_level": _or_null(TEXT),
    "disable_python_gc": BOOL,
    "disable_allgather": BOOL,
    "vocabulary_size": _or_null(COUNT),
    "dataloader_drop_last": BOOL,
    "use_data_before_expert_parallelism": BOOL,
}
