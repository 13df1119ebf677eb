"""Write megatron/cli/deepspeed_json/keys.json: the keys and types of the installed DeepSpeed's config models.

The file lets a config be checked before DeepSpeed is imported. Run this after an upgrade of DeepSpeed.
Schemas follow a small part of the JSON Schema standard. Below are the schemas of keys that DeepSpeed reads without
a model or default that states their type, ranges that it does not check, and reasons why keys are refused.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import _project_root  # noqa: F401
from _atomic_file import atomic_file
from pydantic import TypeAdapter

from megatron.tools.command_line import ToolParser, output_file, run_tool

FILE = Path(__file__).resolve().parent.parent / "megatron" / "cli" / "deepspeed_json" / "keys.json"

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}

BOOL = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 1}
SIZE = {"type": "integer", "minimum": 0}
AMOUNT = {"type": "number", "minimum": 0}
TEXT = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT, "description": "a list of strings"}
CLASSES = {
    "type": "array",
    "items": {"type": "string", "pattern": r"\w+(\.\w+)+"},
    "description": "a list of classes such as torch.nn.Linear",
}
OBJECT = {"type": "object"}
BETAS = {
    "type": "array",
    "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "minItems": 2,
    "maxItems": 2,
    "description": "a list of two numbers from 0 to 1, 1 excluded",
}
_DTYPE = {"type": "string", "enum": ["fp32", "fp16", "bf16"]}
_HALF = [name for kind in ("float16", "bfloat16") for name in (kind, f"torch.{kind}")] + ["fp16", "half", "bf16"]
_NAMED_DTYPE = {"type": "string", "enum": [*_HALF, "fp32", "float", "float32", "torch.float32"]}
_LEVELS = ("debug", "info", "warning", "error", "critical")


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _section(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# Read by DeepSpeedConfig with dict.get, or by a class without a table of defaults.
_WITHOUT_MODEL: dict[str, Any] = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "managed_gradient_accumulation": BOOL,
    "gradient_clipping": AMOUNT,
    "optimizer": _section(type=TEXT, params=OBJECT, legacy_fusion=BOOL),
    "torch_autocast": _section(
        enabled=BOOL, dtype={"type": "string", "enum": _HALF}, lower_precision_safe_modules=CLASSES
    ),
    "data_types": _section(
        grad_accum_dtype=_or_null(_DTYPE),
        param_dtype=_or_null(_NAMED_DTYPE),
        buffer_dtype=_or_null(_NAMED_DTYPE),
        keep_in_fp32_modules={"anyOf": [{"enum": ["auto"]}, TEXTS], "description": '"auto" or a list of strings'},
    ),
    "communication_data_type": _or_null(_DTYPE),
    "seq_parallel_communication_data_type": _or_null(_DTYPE),
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": {"type": "number", "exclusiveMinimum": 0, "description": "a number above 0"},
    "gradient_allreduce_op": {"enum": ["mean", "sum"]},
    "compile": OBJECT,
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
    "checkpoint": _section(
        tag_validation={"type": "string", "pattern": "(?i)ignore|warn|fail", "description": "Ignore, Warn or Fail"},
        load_universal=BOOL,
        parallel_write=_section(pipeline_stage=BOOL),
    ),
    "steps_per_print": _or_null(COUNT),
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
    "log_level": _or_null({"type": "string", "pattern": f"(?i){'|'.join(_LEVELS)}", "description": ", ".join(_LEVELS)}),
    "disable_python_gc": BOOL,
    "disable_allgather": BOOL,
    "vocabulary_size": _or_null(COUNT),
    "dataloader_drop_last": BOOL,
    "use_data_before_expert_parallelism": BOOL,
}

# Stricter than DeepSpeed, or where its default is null.
_STRICTER: dict[str, dict[str, Any]] = {
    "fp16": {
        "loss_scale": AMOUNT,
        "initial_scale_power": {**SIZE, "maximum": 127},  # of fp32
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
        "module_depth": {"type": "integer", "minimum": -1},
        "top_modules": COUNT,
        "output_file": _or_null(TEXT),
    },
    # Not among DeepSpeed's defaults, but read by its pipeline engine.
    "pipeline": {"use_reentrant": BOOL},
}

_WRITER = "checkpoints have their own writer: remove it; --async-save writes during training"
_UNSUPPORTED = "not supported by the training programs: remove it"

_REMOVED = "DeepSpeed no longer supports it: remove it"
_REFUSED: dict[str, str] = {
    "compile": "the model is compiled by the program: use --compile",
    "scheduler": "the learning-rate schedule is set on the command line: use --lr, --min-lr, --lr-decay-style, "
    "--lr-decay-iters and --warmup",
    "bfloat16": 'the old name of "bf16": rename it',
    "tensor_parallel": "the model has its own tensor-parallel layers: use --model-parallel-size",
    "sequence_parallel_size": "it is set on the command line: use --ds-sequence-parallel-size",
    "expert_parallel": "the size is set on the command line: use --expert-model-parallel-size",
    **dict.fromkeys(("data_efficiency", "hybrid_engine", "weight_quantization", "autotuning"), _UNSUPPORTED),
    "allgather_size": 'outdated: write "allgather_bucket_size" inside "zero_optimization"',
    "fp32_allreduce": 'outdated: write "communication_data_type": "fp32"',
    "gradient_accumulation_dtype": 'outdated: write "data_types": {"grad_accum_dtype": "fp32"}',
    "amp": 'DeepSpeed no longer supports it: use "fp16" or "bf16"',
    "zero_optimization.cpu_offload": 'outdated: write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'outdated: write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": 'outdated: write "pin_memory" inside "offload_optimizer"',
    "zero_optimization.legacy_stage1": _REMOVED,
    "zero_optimization.zenflow": _UNSUPPORTED,
    **dict.fromkeys(
        ("zero_optimization.stage3_module_granularity_threshold", "zero_optimization.module_granularity_threshold"),
        'DeepSpeed releases the weights of such modules before their gradients are added: write "leaf_module"',
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": 'outdated: write "stage3_gather_16bit_weights_on'
    '_model_save"',
    **dict.fromkeys(("checkpoint.writer", "checkpoint.checkpoint_serialization", "datastates_ckpt"), _WRITER),
    "checkpoint.use_node_local_storage": "a checkpoint is saved in one folder: remove it, and name a folder that all "
    "hosts share with --save",
    "pipeline.stages": "the stages are set on the command line: use --pipe-parallel-size",
    "pipeline.partition": "the partition is set on the command line: use --pipeline-partition",
    "pipeline.seed_layers": "the model seeds its own layers: remove it",
    "pipeline.activation_checkpoint_interval": "use --checkpoint-activations and --checkpoint-num-layers",
}
"""Path of a key, joined with dots, to the reason why it is refused, besides those that DeepSpeed has removed."""

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

_OPTIMIZERS = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": {**_COMMON, "eps": AMOUNT, "fused": BOOL},
    "Lamb": _LAMB,
    "Lion": {**_COMMON, "betas": BETAS},
    "SGD": {**_COMMON, "momentum": AMOUNT, "fused": BOOL},
    "Muon": {**_COMMON, "momentum": AMOUNT, "betas": BETAS, "eps": AMOUNT},
    "Adafactor": _COMMON,
}


def main() -> None:
    """Parse the command line and write the file."""
    parser = ToolParser(__doc__.splitlines()[0])
    parser.add_argument("--output", type=output_file, default=FILE, metavar="FILE", help="file to write")
    args = parser.parse_args()
    with atomic_file(args.output, "--output") as file:
        file.write(as_text(deepspeed_keys()))


def deepspeed_keys() -> dict[str, Any]:
    """A JSON schema of each key of a config, or why it is refused, and of each parameter of its optimizers."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    keys = _WITHOUT_MODEL | _keys_with_model()
    for section, properties in _STRICTER.items():
        keys[section]["properties"] |= properties
    removed = [*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)]
    for path, reason in (dict.fromkeys(removed, _REMOVED) | _REFUSED).items():
        *sections, name = path.split(".")
        properties = keys
        for section in sections:
            properties = properties[section]["properties"]
        properties[name] = {"refused": reason}
    return {"keys": keys, "optimizers": _OPTIMIZERS}


def _keys_with_model() -> dict[str, Any]:
    """A schema of each section for which DeepSpeed has a pydantic model or a dictionary of defaults."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
    }
    defaults = {
        "activation_checkpointing": ACT_CHKPT_DEFAULT,
        "aio": AIO_DEFAULT_DICT,
        "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
        "pipeline": get_pipeline_config({}),
    }
    return {
        **{section: _schema_of_model(model) for section, model in models.items()},
        "timers": {"type": "object", "properties": {"throughput": _schema_of_model(DeepSpeedThroughputTimerConfig)}},
        **{section: _schema_of_defaults(values) for section, values in defaults.items()},
    }


def _schema_of_model(model: Any) -> dict[str, Any]:
    """Properties under both names of a field, without the deprecated ones."""
    properties: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if not (field.json_schema_extra or {}).get("deprecated"):
            schema = TypeAdapter(Annotated[(field.annotation, *field.metadata, None)]).json_schema()
            properties |= {key: _simplified(schema, schema.get("$defs", {})) for key in (name, field.alias) if key}
    return {"type": "object", "properties": properties}


def _simplified(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Type and range only, with definitions in place of references."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    options = [_simplified(option, definitions) for option in schema.get("anyOf", ())]
    objects = [option for option in options if option["type"] == "object"]
    if options:
        return objects[0] if objects else {"anyOf": options}
    if "properties" in schema:
        inner = {name: _simplified(each, definitions) for name, each in schema["properties"].items()}
        return {"type": "object", "properties": inner}
    kept = {name: schema[name] for name in ("type", "enum", "minimum", "maximum") if name in schema}
    if "items" in schema:
        items = _simplified(schema["items"], definitions)
        kept |= {"items": items, "description": f"a list of {items['type']}s" if "type" in items else "a list"}
    if "enum" in kept:
        kept["enum"] = list(dict.fromkeys(kept["enum"]))
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        kept["minimum"] = schema["exclusiveMinimum"] + 1
    return kept


def _schema_of_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """A type for each default; an empty schema, which _STRICTER completes, for null."""
    types = {name: _TYPES.get(type(value)) for name, value in values.items()}
    return {"type": "object", "properties": {name: {"type": kind} if kind else {} for name, kind in types.items()}}


def as_text(schema: dict[str, Any], indent: str = "") -> str:
    """JSON with one line for each key of a config."""
    if not any(isinstance(value, dict) for value in schema.values()):
        return json.dumps(schema)
    lines = (f"{indent}  {json.dumps(name)}: {_value_as_text(value, indent + '  ')}" for name, value in schema.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + ("" if indent else "\n")


def _value_as_text(value: Any, indent: str) -> str:
    return as_text(value, indent) if isinstance(value, dict) else json.dumps(value)


if __name__ == "__main__":
    run_tool(main)
