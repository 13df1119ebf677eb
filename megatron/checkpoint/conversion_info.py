"""What DeepSpeed's own conversion of a checkpoint needs, and it does not save by itself."""

import re
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.config import ModelConfig, RunConfig
from megatron.engines.state import parameter_shapes
from megatron.model.architectures import architecture_of


def conversion_info(engine: DeepSpeedEngine, run: RunConfig) -> dict[str, Any]:
    """What a conversion needs and DeepSpeed does not save by itself, to be saved as client state."""
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": run.model.vocab_size,
        "padded_vocab_size": run.model.padded_vocab_size,
        **parameter_patterns(run.model),
    }
    # Only with ZeRO DeepSpeed itself saves which parameters the optimizer's tensors are.
    shapes = {} if run.zero.zero_stage else {"param_shapes": parameter_shapes(engine)}
    return {"universal_checkpoint_info": info, **shapes}


def parameter_patterns(model: ModelConfig) -> dict[str, list[str]]:
    """Regular expressions of parameter names, by which DeepSpeed's own conversion merges tensor-parallel shards."""
    named = architecture_of(model).named_parameters(model)
    specs = {f"{re.escape(name)}$": spec for name, spec in named.items()}
    return {
        "vocabulary_parameter_patterns": [name for name, spec in specs.items() if spec.is_vocabulary],
        "tp_replicated_parameter_patterns": [name for name, spec in specs.items() if spec.shard_dim is None],
        "parameter_with_row_parallelism_patterns": [name for name, spec in specs.items() if spec.shard_dim == 1],
        "pipeline_replicated_parameter_patterns": [name for name in specs if name.startswith("tied_modules")],
    }
