"""The keys of a DeepSpeed config and the values they accept, as JSON schemas (a small part of the standard).

``keys.json`` is generated from the installed DeepSpeed by tools/write_deepspeed_keys.py, so that a
config can be checked before DeepSpeed is imported. Below are the keys that DeepSpeed reads without a
model or default that states their type, and ranges that it does not check.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
"""Of one value. An object without properties accepts any keys."""

BOOL: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 1}
SIZE: Schema = {"type": "integer", "minimum": 0}
AMOUNT: Schema = {"type": "number", "minimum": 0}
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT, "description": "a list of strings"}
OBJECT: Schema = {"type": "object"}
BETAS: Schema = {
    "type": "array",
    "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "minItems": 2,
    "maxItems": 2,
    "description": "a list of two numbers from 0 to 1, 1 excluded",
}
_DTYPE: Schema = {"type": "string", "enum": ["fp32", "fp16", "bf16"]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _section(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


# Read by DeepSpeedConfig with dict.get, or by a class without a table of defaults.
_WITHOUT_MODEL: dict[str, Schema] = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "managed_gradient_accumulation": BOOL,
    "gradient_clipping": AMOUNT,
    "optimizer": _section(type=TEXT, params=OBJECT, legacy_fusion=BOOL),
    "torch_autocast": _section(enabled=BOOL, dtype=TEXT, lower_precision_safe_modules=TEXTS),
    "data_types": _section(
        grad_accum_dtype=_or_null(_DTYPE),
        param_dtype=_or_null(TEXT),
        buffer_dtype=_or_null(TEXT),
        keep_in_fp32_modules={"anyOf": [{"enum": ["auto"]}, TEXTS], "description": '"auto" or a list of strings'},
    ),
    "communication_data_type": _or_null(_DTYPE),
    "seq_parallel_communication_data_type": _or_null(_DTYPE),
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": AMOUNT,
    "gradient_allreduce_op": {"enum": ["mean", "sum"]},
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
    "checkpoint": _section(
        tag_validation={"type": "string", "pattern": "(?i)ignore|warn|fail", "description": "Ignore, Warn or Fail"},
        load_universal=BOOL,
        parallel_write=_section(pipeline_stage=BOOL),
    ),
    # Checked by DeepSpeed's own models when it starts.
    "compile": OBJECT,
    "comet": OBJECT,
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

# Stricter than DeepSpeed, or where its default is null.
_STRICTER: dict[str, dict[str, Schema]] = {
    "fp16": {
        "loss_scale": AMOUNT,
        "initial_scale_power": SIZE,
        "loss_scale_window": COUNT,
        "hysteresis": COUNT,
        "min_loss_scale": COUNT,
    },
    "comms_logger": {"prof_ops": TEXTS},
    "activation_checkpointing": {"number_checkpoints": _or_null(COUNT)},
    "aio": {"block_size": COUNT, "queue_depth": COUNT, "intra_op_parallelism": COUNT},
    "flops_profiler": {
        "recompute_fwd_factor": AMOUNT,
        "profile_step": COUNT,
        "top_modules": COUNT,
        "output_file": _or_null(TEXT),
    },
    # Not among DeepSpeed's defaults, but read by its pipeline engine.
    "pipeline": {"use_reentrant": BOOL},
}


def _all_keys() -> dict[str, Schema]:
    keys = _WITHOUT_MODEL | json.loads(Path(__file__).with_name("keys.json").read_text())
    for section, properties in _STRICTER.items():
        keys[section] = _section(**{**keys[section]["properties"], **properties})
    return keys


TOP_KEYS: dict[str, Schema] = _all_keys()

_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, name: _TYPES[name](value),
    "anyOf": lambda value, options: any(accepts(option, value) for option in options),
    "enum": lambda value, choices: not isinstance(value, bool) and value in choices,
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "items": lambda value, schema: all(accepts(schema, item) for item in value),
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "pattern": lambda value, pattern: re.fullmatch(pattern, value) is not None,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),  # 5e8 is a usual bucket size
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def accepts(schema: Schema, value: Any) -> bool:
    """Whether ``value`` is legal. The type comes first in each schema, so that the other checks apply to it."""
    return all(_CHECKS[name](value, limit) for name, limit in schema.items() if name in _CHECKS)


def expected(schema: Schema) -> str:
    """A description of the legal values, such as ``a whole number from 1 on``."""
    if "description" in schema:
        return schema["description"]
    if "anyOf" in schema:
        return ", or ".join(map(expected, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    words = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "a string",
        "array": "a list",
        "object": "an object",
        "null": "null",
    }[schema["type"]]
    if "maximum" in schema:
        return f"{words} from {schema['minimum']:g} to {schema['maximum']:g}"
    return f"{words} from {schema['minimum']:g} on" if "minimum" in schema else words


_COMMON = {"lr": AMOUNT, "weight_decay": AMOUNT}
_ADAM = {
    **_COMMON,
    "betas": BETAS,
    "eps": AMOUNT,
    "torch_adam": BOOL,
    "fused": BOOL,
    "adam_w_mode": BOOL,
    "fp32_optimizer_states": BOOL,
}
_LAMB = {**_COMMON, "betas": BETAS, "eps": AMOUNT, "max_coeff": AMOUNT, "min_coeff": AMOUNT, "bias_correction": BOOL}


class Optimizer(NamedTuple):
    """An optimizer that a config may name."""

    params: Mapping[str, Schema]
    tested_with_zero: bool = True
    """Whether DeepSpeed runs it under ZeRO without "zero_allow_untested_optimizer"."""
    needs_gpu: bool = False
    """Whether it is available as a CUDA kernel only, unless it is offloaded."""


OPTIMIZERS: dict[str, Optimizer] = {
    "Adam": Optimizer(_ADAM),
    "AdamW": Optimizer(_ADAM),
    "Adagrad": Optimizer({**_COMMON, "eps": AMOUNT}),
    "Lamb": Optimizer(_LAMB, tested_with_zero=False, needs_gpu=True),
    "Lion": Optimizer({**_COMMON, "betas": BETAS}, needs_gpu=True),
    "SGD": Optimizer({**_COMMON, "momentum": AMOUNT}, tested_with_zero=False),
}
DEFAULT_OPTIMIZER = "AdamW"


def optimizer_name(text: str) -> str | None:
    """The key of OPTIMIZERS that equals ``text`` but for case, or None."""
    return next((name for name in OPTIMIZERS if name.lower() == text.lower()), None)
