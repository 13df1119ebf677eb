"""Write megatron/config/deepspeed_json/keys.json: the keys and types of the installed DeepSpeed's config models.

The file lets a config be checked before DeepSpeed is imported. Run this after an upgrade of DeepSpeed.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import _project_root  # noqa: F401
from _atomic_file import atomic_file
from pydantic import TypeAdapter

from megatron.tools.command_line import ToolParser, run_tool

FILE = Path(__file__).resolve().parent.parent / "megatron" / "config" / "deepspeed_json" / "keys.json"

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def main() -> None:
    """Parse the command line and write the file."""
    parser = ToolParser(__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FILE, metavar="FILE", help="file to write")
    args = parser.parse_args()
    with atomic_file(args.output, "--output") as file:
        file.write(as_text(deepspeed_keys()))


def deepspeed_keys() -> dict[str, Any]:
    """A JSON schema of each section for which DeepSpeed has a pydantic model or a dictionary of defaults."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
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
    """Type and range only, with definitions in place of references. DeepSpeed checks deeper objects itself."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    options = [_simplified(option, definitions) for option in schema.get("anyOf", ())]
    objects = [option for option in options if option["type"] == "object"]
    if options:
        return objects[0] if objects else {"anyOf": options}
    if "properties" in schema:
        known = schema["title"] in ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")
        inner = {name: _simplified(each, definitions) for name, each in schema["properties"].items()}
        return {"type": "object", **({"properties": inner} if known else {})}
    kept = {name: schema[name] for name in ("type", "enum", "minimum", "maximum") if name in schema}
    if "enum" in kept:
        kept["enum"] = list(dict.fromkeys(kept["enum"]))
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        kept["minimum"] = schema["exclusiveMinimum"] + 1
    return kept


def _schema_of_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """A type for each default; an empty schema, which keys.py completes, for null."""
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
