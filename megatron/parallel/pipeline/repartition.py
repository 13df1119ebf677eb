"""``--repartition-from``: pipeline stages that take equally long, by the times of a trace. No torch here."""

import json
import math
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig, ParallelConfig
from megatron.config.errors import ConfigError
from megatron.parallel.pipeline.partition import balanced

TRACE = "trace.json"
"""What a trace of all ranks is called in its folder."""


def repartitioned(parallel: ParallelConfig, model: ModelConfig) -> str:
    """The layers of each piece, as ``--pipeline-partition`` takes them, by the trace that ``parallel`` names.

    Raises:
        ConfigError: where the trace cannot be read, or is of another number of layers or less than the pieces.
    """
    said = f"--repartition-from {parallel.repartition_from}"
    costs = _costs(said, Path(str(parallel.repartition_from)))
    front, *layers, back = costs
    if len(layers) != model.num_layers:
        raise ConfigError(
            f"{said} has the times of {len(layers)} layers, and --num-layers is {model.num_layers}: trace this model"
        )
    if len(layers) + 1 < parallel.model_chunks:
        raise ConfigError(f"{said}: {len(layers)} layers and the head are less than {parallel.model_chunks} pieces")
    # The embeddings stay with the first layer, and the head is no layer.
    weights = [_nanoseconds(front + layers[0]), *map(_nanoseconds, (*layers[1:], back))]
    *sizes, last = balanced(weights, parallel.model_chunks)
    return ",".join(map(str, (*sizes, last - 1)))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _costs(said: str, place: Path) -> list[float]:
    """Seconds of a micro-batch in each unit, forward and backward: embeddings, layers, head."""
    path = place / TRACE if place.is_dir() else place
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{said}: {path} cannot be read ({error.strerror}); name a folder of --trace") from error
    except ValueError as error:
        raise ConfigError(f"{said}: {path} is not JSON; name a folder of --trace") from error
    about = found.get("otherData") if isinstance(found, dict) else None
    costs = about.get("unit_seconds") if isinstance(about, dict) else None
    if not isinstance(costs, list) or len(costs) < 3 or not all(map(_is_time, costs)):
        raise ConfigError(f"{said}: {path} holds no times of layers; name a folder that --trace wrote")
    return costs


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
