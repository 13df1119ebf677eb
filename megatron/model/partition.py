"""Partitions a model into pipeline stages. No torch here.

A *layer group* is never divided: the layers before the transformer layers (the embeddings), each
transformer layer, and the layers after them (final norm and head). A *model chunk* consists of consecutive groups.
The pipeline schedule determines whether a stage holds one chunk or several.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

from megatron.common.errors import ConfigError
from megatron.common.reading import LARGEST, read_json
from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.model.architectures import architecture_of
from megatron.model.spec import LayerSpec
from megatron.parallel.pipeline.schedule import Schedule, chunks_of, has_order
from megatron.parallel.pipeline.simulation import counts_in_flight

EXPLICIT = re.compile(r"[0-9]{1,9}( *, *[0-9]{1,9})*")
BY_TYPE = "type:"

LayerGroup = tuple[LayerSpec, ...]
LayerCounts = tuple[tuple[LayerSpec, int], ...]
"""Distinct layers with their counts. Equal layers of an architecture are the same object."""
Value = TypeVar("Value")
POSITIONS = "RelativePositions"
"""Class name of the layer in front of each transformer layer of T5."""


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage, unsharded."""

    chunks: tuple[range, ...]
    """The layer groups of each model chunk: 0 is the embeddings, n transformer layer n, the last one the head."""
    layers_of_chunks: tuple[tuple[LayerSpec, ...], ...]
    has_embedding: bool
    has_head: bool

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers of all chunks of the stage."""
        return tuple(layer for layers in self.layers_of_chunks for layer in layers)

    @cached_property
    def counts(self) -> LayerCounts:
        """The distinct layers of the stage with their counts."""
        return counts(self.layers)

    @cached_property
    def num_blocks(self) -> int:
        """Number of transformer layers of the stage."""
        return sum(count for layer, count in self.counts if layer.is_block)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the stage; tied layers count once."""
        return sum(layer.numel for layer in self.distinct_layers())

    def flops(self, seq_length: int) -> int:
        """FLOPs of the forward pass for one token."""
        return sum(count * layer.flops(seq_length) for layer, count in self.counts)

    def distinct_layers(self) -> list[LayerSpec]:
        """The layers of the stage in order; tied layers once."""
        return list({layer.tied or index: layer for index, layer in enumerate(self.layers)}.values())


METHODS: dict[str, Callable[[LayerGroup, int], int]] = {
    "uniform": lambda group, seq_length: 1,
    "parameters": lambda group, seq_length: sum(layer.numel for layer in group),
    "flops": lambda group, seq_length: sum(layer.flops(seq_length) for layer in group),
}
"""Partition method to the weight of a layer group; stages get about equal weight."""


@lru_cache(maxsize=64)
def layer_groups(model: ModelConfig) -> tuple[LayerGroup, ...]:
    """The layers of ``model`` in groups that are never divided, from the embeddings to the head.

    Layers between two transformer layers belong to the later group, as do the relative positions before the first.
    """
    layers = tuple(architecture_of(model).layers(model))
    blocks = [index for index, layer in enumerate(layers) if layer.is_block]
    assert len(blocks) == model.num_layers
    first = blocks[0] - (layers[blocks[0] - 1].class_name == POSITIONS)
    begins = [first, *(index + 1 for index in blocks)]
    return (layers[:first], *(layers[begin:end] for begin, end in pairwise(begins)), layers[begins[-1] :])


def layer_names(model: ModelConfig) -> tuple[str, ...]:
    """The distinct class names of the layers of ``model``."""
    return tuple(dict.fromkeys(layer.class_name for group in layer_groups(model) for layer in group))


@lru_cache(maxsize=64)
def group_weights(method: str, model: ModelConfig, seq_length: int) -> tuple[int, ...]:
    """The weight of each layer group by ``method``, which must not be an explicit list."""
    groups = layer_groups(model)
    if not method.startswith(BY_TYPE):
        return tuple(METHODS[method](group, seq_length) for group in groups)
    pattern = re.compile(method.removeprefix(BY_TYPE), re.IGNORECASE)
    matches = {name: bool(pattern.search(name)) for name in {layer.class_name for group in groups for layer in group}}
    return tuple(sum(matches[layer.class_name] for layer in group) for group in groups)


def explicit(method: str) -> tuple[int, ...] | None:
    """The numbers of an explicit list such as ``3,5,4``; None for other partition methods."""
    return tuple(int(number) for number in method.split(",")) if EXPLICIT.fullmatch(method) else None


def layers_per_chunk(run: RunConfig) -> tuple[int, ...]:
    """Transformer layers of each model chunk, in the order of the model."""
    if (numbers := explicit(run.parallel.pipeline_partition)) is not None:
        return numbers
    weights, split = run_weights(run), run.parallel.pipeline_model_parallel_split_rank
    if split is None:
        *sizes, last = balanced(weights, run.parallel.model_chunks)
    else:
        encoder = run.model.encoder_num_layers
        sizes = balanced(weights[:encoder], split)
        *later, last = balanced(weights[encoder:], run.parallel.model_chunks - split)
        sizes += later
    return (*sizes, last - 1)  # the head is not a transformer layer


def run_weights(run: RunConfig) -> list[int]:
    """The weight of each transformer layer and of the head; the embeddings are added to the first layer.

    Only an explicit list may separate the embeddings from the first layer, since some optimizers need parameters
    without weight decay on every stage.
    """
    front, first, *rest = group_weights(run.parallel.pipeline_partition, run.model, run.data.seq_length)
    return [front + first, *rest]


def partition_boundaries(layers_per_chunk: Sequence[int], model: ModelConfig) -> list[int]:
    """The index of the first layer of each model chunk, followed by the number of layers."""
    front, *blocks, back = layer_groups(model)
    before = [0, *accumulate(map(len, blocks))]
    inner = [len(front) + before[layers] for layers in accumulate(layers_per_chunk)]
    return [0, *inner[:-1], inner[-1] + len(back)]


def plan(run: RunConfig) -> list[Stage]:
    """The pipeline stages of ``run``."""
    groups = layer_groups(run.model)
    ends = [1 + layers for layers in accumulate(layers_per_chunk(run))]
    chunks = [range(begin, end) for begin, end in pairwise([0, *ends[:-1], len(groups)])]
    schedule, stages = run.parallel.pipeline_schedule, run.parallel.pipe_stages
    per_stage = [chunks_of(schedule, stage, stages, run.parallel.model_chunks // stages) for stage in range(stages)]
    return [_stage(tuple(chunks[number] for number in numbers), groups) for numbers in per_stage]


def _stage(chunks: tuple[range, ...], groups: Sequence[LayerGroup]) -> Stage:
    layers = tuple(tuple(layer for number in chunk for layer in groups[number]) for chunk in chunks)
    return Stage(chunks, layers, chunks[0].start == 0, chunks[-1].stop == len(groups))


def counts(values: Sequence[Value]) -> tuple[tuple[Value, int], ...]:
    """The distinct objects (by identity) with their counts."""
    by_identity = {id(value): value for value in values}
    return tuple((by_identity[number], count) for number, count in Counter(map(id, values)).items())


def inputs_in_flight(run: RunConfig) -> int:
    """Maximum number of layer inputs that one rank keeps at a time, for any number of micro-batches."""
    parallel, method = run.parallel, run.parallel.pipeline_partition
    stages, chunks = parallel.pipe_stages, parallel.model_chunks // parallel.pipe_stages
    if method in ("parameters", "flops") or not has_order(parallel.pipeline_schedule, stages, 4 * stages, chunks):
        # These partitions depend on the vocabulary size, which is not known yet: use an upper bound.
        return (parallel.model_chunks + 1) * run.model.num_layers
    schedule, layers = Schedule(parallel.pipeline_schedule, stages, 4 * stages, chunks), layers_per_chunk(run)
    return max(
        sum(count * layers[chunk] for count, chunk in zip(counts, schedule.chunks_of(stage), strict=True))
        for stage in range(stages)
        for counts in counts_in_flight(schedule, stage)
    )


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Partition ``weights`` into ``parts`` non-empty consecutive runs; returns their lengths.

    Minimizes the heaviest run, then the sum of squares. Among equally good partitions the one with longer first runs
    is chosen. (DeepSpeed's ``partition_balanced`` minimizes only the heaviest run, and needs torch.)
    """
    return list(_balanced(tuple(weights), parts))


@lru_cache(maxsize=256)
def _balanced(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Dynamic programming over the end of each part: the least sum of squares, and the begin of the last part."""
    sums, limit = [0, *accumulate(weights)], _smallest_maximum(weights, parts)
    tables: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for part in range(1, parts + 1):
        before, best = tables[-1], dict[int, tuple[int, int]]()
        for end in range(part, len(sums) - (parts - part)):
            for begin in range(end - 1, part - 2, -1):
                run = sums[end] - sums[begin]
                if run > limit or (end in best and run * run >= best[end][0]):
                    break  # even longer runs cost no less
                if begin in before and (end not in best or before[begin][0] + run * run < best[end][0]):
                    best[end] = before[begin][0] + run * run, begin
        tables.append(best)
    ends = [len(weights)]
    for best in reversed(tables[1:]):
        ends.append(best[ends[-1]][1])
    return tuple(end - begin for begin, end in pairwise(reversed(ends)))


def _smallest_maximum(weights: Sequence[int], parts: int) -> int:
    """The smallest possible weight of the heaviest of ``parts`` runs."""

    def is_enough(heaviest: int) -> bool:
        runs, total = 1, 0
        for weight in weights:
            total += weight
            if total > heaviest:
                runs, total = runs + 1, weight
        return runs <= parts

    least = max(weights)
    return least + bisect_left(range(least, sum(weights)), True, key=is_enough)


TRACE = "trace.json"
"""Name of the trace of all ranks in a folder of --trace."""


def repartitioned(parallel: ParallelConfig, model: ModelConfig) -> str:
    """A ``--pipeline-partition`` (layers per chunk) that balances the times measured in ``--repartition-from``.

    Raises ConfigError if the trace cannot be read, has another number of layers, or fewer layers than model chunks.
    """
    flag = f"--repartition-from {parallel.repartition_from}"
    front, *layers, back = _costs(flag, Path(str(parallel.repartition_from)))
    if len(layers) != model.num_layers:
        raise ConfigError(
            f"{flag} has the times of {len(layers)} layers, and --num-layers is {model.num_layers}: trace this model"
        )
    if len(layers) + 1 < parallel.model_chunks:
        raise ConfigError(
            f"{flag}: {len(layers)} layers and the head are fewer than the {parallel.model_chunks} model chunks"
        )
    # The embeddings stay with the first layer, and the head does not count as a transformer layer.
    weights = [round(seconds * 1e9) for seconds in (front + layers[0], *layers[1:], back)]
    *sizes, last = balanced(weights, parallel.model_chunks)
    return ",".join(map(str, (*sizes, last - 1)))


def _costs(flag: str, trace: Path) -> list[float]:
    """Forward and backward seconds per micro-batch of each layer group in a trace: embeddings, layers, head."""
    path = trace / TRACE if trace.is_dir() else trace
    try:
        content = read_json(path, largest=LARGEST)
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read ({error.strerror}); name a folder of --trace") from error
    except ValueError as error:
        raise ConfigError(f"{flag}: {path} is not JSON; name a folder of --trace") from error
    metadata = content.get("otherData") if isinstance(content, dict) else None
    costs = metadata.get("unit_seconds") if isinstance(metadata, dict) else None
    if not isinstance(costs, list) or len(costs) < 3 or not all(map(_is_time, costs)):
        raise ConfigError(f"{flag}: {path} has no times of layers; name a folder that --trace wrote")
    return costs


_DAY = 86_400


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _DAY  # NaN is not
