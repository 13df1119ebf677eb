"""The table of keys, beside what DeepSpeed itself knows."""

from collections.abc import Iterator
from typing import Any, get_args

from megatron.config.deepspeed_json.file import REFUSED_KEYS
from megatron.config.deepspeed_json.keys import BOOL, TOP_KEYS
from megatron.config.deepspeed_json.sections import OPTIMIZERS


class Recorder(dict):
    """A config that remembers which keys it was asked for."""

    def __init__(self) -> None:
        super().__init__(train_batch_size=1)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Recorder":
        return self


def test_top_keys_are_those_deepspeed_asks_for() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Recorder()
    DeepSpeedConfig(config)
    refused = {key for key in REFUSED_KEYS if "." not in key}
    assert config.asked - set(TOP_KEYS) - refused == set()
    assert set(TOP_KEYS) - config.asked == set()


def _models() -> Iterator[tuple[str, Any, Any]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    zero: Any = TOP_KEYS["zero_optimization"]
    timers: Any = TOP_KEYS["timers"]
    yield "zero_optimization", zero, DeepSpeedZeroConfig
    yield "offload_param", zero["offload_param"], DeepSpeedZeroOffloadParamConfig
    yield "offload_optimizer", zero["offload_optimizer"], DeepSpeedZeroOffloadOptimizerConfig
    yield "fp16", TOP_KEYS["fp16"], DeepSpeedFP16Config
    yield "bf16", TOP_KEYS["bf16"], DeepSpeedBF16Config
    yield "comms_logger", TOP_KEYS["comms_logger"], CommsLoggerConfig
    yield "tensorboard", TOP_KEYS["tensorboard"], TensorBoardConfig
    yield "wandb", TOP_KEYS["wandb"], WandbConfig
    yield "csv_monitor", TOP_KEYS["csv_monitor"], CSVConfig
    yield "throughput", timers["throughput"], DeepSpeedThroughputTimerConfig


def test_sections_are_those_of_deepspeeds_models() -> None:
    for section, keys, model in _models():
        known = {}
        for name, field in model.model_fields.items():
            if f"{section}.{name}" not in REFUSED_KEYS:
                known |= {name: field} | ({field.alias: field} if field.alias else {})
        assert set(keys) == set(known), section
        booleans = {name for name, field in known.items() if field.annotation is bool}
        optional = {name for name, field in known.items() if bool in get_args(field.annotation)}
        assert {name for name, kind in keys.items() if kind is BOOL} == booleans - optional, section


def test_sections_without_a_model_are_those_of_deepspeeds_classes() -> None:
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert set(TOP_KEYS["activation_checkpointing"]) == set(ACT_CHKPT_DEFAULT)
    assert set(TOP_KEYS["aio"]) == set(AIO_DEFAULT_DICT)
    assert set(TOP_KEYS["flops_profiler"]) == set(vars(DeepSpeedFlopsProfilerConfig({})))
    refused = {key.removeprefix("pipeline.") for key in REFUSED_KEYS if key.startswith("pipeline.")}
    assert set(get_pipeline_config({})) == (set(TOP_KEYS["pipeline"]) - {"use_reentrant"}) | refused


def test_keys_that_deepspeed_removed_are_refused() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(REFUSED_KEYS)
    assert {f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS} <= set(REFUSED_KEYS)


def test_optimizers_are_ones_that_deepspeed_builds() -> None:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    for name in OPTIMIZERS:
        assert name.lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, name)
