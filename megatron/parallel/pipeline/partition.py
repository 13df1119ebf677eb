"""How the model is cut into pipeline stages: arithmetic alone, for the rules, the model and the printed plan.

A *unit* is what is never cut: the embeddings, each transformer layer, and the final norm with the
head. A *piece* is a run of units. A stage holds one piece; with DualPipeV two, one on the way out
and the one opposite it on the way back.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megatron.config import ModelConfig, RunConfig
from megatron.config.architecture import BERT, GPT2

LAYER = ("ParallelTransformerLayer",)
"""Names of what a unit takes up in the model's list of layers, in order."""

EXPLICIT = re.compile(r"\d+( *, *\d+)*")
BY_TYPE = "type:"


class Unit(NamedTuple):
    """What is never cut, and what it costs, all tensor-parallel ranks together."""

    names: tuple[str, ...]
    parameters: int
    flops: int
    """Operations of the forward pass for one token."""
    tied: int = 0
    """Of the parameters, those that the first unit has too: a stage that holds both has them once."""


class Stage(NamedTuple):
    """What one pipeline stage holds, all of its tensor-parallel ranks together."""

    pieces: tuple[range, ...]
    """Its runs of units: 0 is the embeddings, n transformer layer n, the last one the head."""
    parameters: int
    flops: int


METHODS: dict[str, Callable[[Unit], int]] = {
    "uniform": lambda unit: 1,
    "parameters": lambda unit: unit.parameters,
    "flops": lambda unit: unit.flops,
}
"""What each unit weighs, where stages shall weigh the same."""


def units(model: ModelConfig, seq_length: int) -> list[Unit]:
    """The units of a model, from the embeddings to the head.

    A matrix takes two operations for each of its weights and tokens, and attention 4 s h: its two
    products in full, without what causality would save. The rest is next to nothing.
    """
    h, inner = model.hidden_size, model.ffn_hidden_size
    matrices = 4 * h * h + 2 * h * inner
    biases_and_norms = 9 * h + inner
    layer = Unit(LAYER, matrices + biases_and_norms, 2 * matrices + 4 * seq_length * h)
    front, back = ENDS[model.architecture](model)
    return [front, *[layer] * model.num_layers, back]


def _gpt2_ends(model: ModelConfig) -> tuple[Unit, Unit]:
    h, table = model.hidden_size, model.padded_vocab_size * model.hidden_size
    front = Unit(("WordEmbedding", "PositionEmbedding"), table + model.max_position_embeddings * h, 0)
    return front, Unit(("without_segment_ids", "LayerNorm", "WordEmbedding"), 2 * h + table, 2 * table, tied=table)


def _bert_ends(model: ModelConfig) -> tuple[Unit, Unit]:
    h, (front, back) = model.hidden_size, _gpt2_ends(model)
    dense, norm, order = h * h + h, 2 * h, 2 * h + 2
    return (
        Unit(("PairEmbedding", "TokenTypeEmbedding", "PositionEmbedding"), front.parameters + 2 * h, 0),
        Unit(
            ("without_segment_ids", "LayerNorm", "PairHead", "PairEmbedding", "WordBias"),
            back.parameters + 2 * dense + norm + order + model.padded_vocab_size,
            back.flops + 2 * h * h,  # the order is read from one token of each sample
            tied=back.tied,
        ),
    )


ENDS: dict[str, Callable[[ModelConfig], tuple[Unit, Unit]]] = {GPT2.name: _gpt2_ends, BERT.name: _bert_ends}
"""The first and the last unit of each model."""


def layer_names(model: ModelConfig) -> tuple[str, ...]:
    """What a model's list of layers consists of, by name, each kind of unit once."""
    front, back = ENDS[model.architecture](model)
    return front.names + LAYER + back.names


def weights(method: str, units: Sequence[Unit]) -> list[int]:
    """What each unit weighs by ``method``, which is no explicit list."""
    if method.startswith(BY_TYPE):
        pattern = re.compile(method.removeprefix(BY_TYPE), re.IGNORECASE)
        kinds = {unit.names for unit in units}
        found = {names: sum(bool(pattern.search(name)) for name in names) for names in kinds}
        return [found[unit.names] for unit in units]
    return [METHODS[method](unit) for unit in units]


def explicit(method: str) -> tuple[int, ...] | None:
    """The numbers of an explicit list such as ``3,5,4``; None where ``method`` is another one."""
    return tuple(int(number) for number in method.split(",")) if EXPLICIT.fullmatch(method) else None


def layers_per_chunk(run: RunConfig) -> tuple[int, ...]:
    """Transformer layers of each piece, in the order of the model."""
    if (said := explicit(run.parallel.pipeline_partition)) is not None:
        return said
    *sizes, last = balanced(shares(run), run.parallel.model_chunks)
    return (*sizes, last - 1)  # the head is no layer


def shares(run: RunConfig) -> list[int]:
    """What each layer weighs, the embeddings with the first one, and what the head does; of no explicit list.

    Only an explicit list may part the embeddings from the first layer: not every optimizer can do with that.
    """
    front, first, *others = weights(run.parallel.pipeline_partition, units(run.model, run.data.seq_length))
    return [front + first, *others]


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Lengths of ``parts`` runs of ``weights``, none of them empty.

    The heaviest run is as light as can be, and the others then as equal as can be. Among equals the
    first runs are the longer ones.
    """
    return list(_balanced(tuple(weights), parts))


@lru_cache(maxsize=256)
def _balanced(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    sums = [0, *accumulate(weights)]
    lightest, _ = _cheapest(sums, parts, max, lambda weight: weight)
    _, lengths = _cheapest(sums, parts, sum, lambda weight: weight * weight if weight <= lightest else float("inf"))
    return tuple(lengths)


def _cheapest(
    sums: Sequence[int], parts: int, join: Callable[[tuple[float, float]], float], price: Callable[[int], float]
) -> tuple[float, list[int]]:
    """The cheapest way to cut ``sums`` (running sums from 0 on) into ``parts``, and the parts' lengths.

    The parts' prices, joined, are the cost. Dynamic programming over where each part ends.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}
    for _ in range(parts):
        longer = {}
        for end in range(1, len(sums)):
            cheapest: tuple[float, int] | None = None
            for begin in range(end - 1, -1, -1):
                run = price(sums[end] - sums[begin])
                if cheapest is not None and run >= cheapest[0]:
                    break  # a run that is longer still costs no less
                if begin in best:
                    cost = join((best[begin][0], run))
                    if cheapest is None or cost < cheapest[0]:
                        cheapest = (cost, begin)
            if cheapest is not None:
                cost, begin = cheapest
                longer[end] = (cost, [*best[begin][1], end - begin])
        best = longer
    return best[len(sums) - 1]


def partition_boundaries(layers_per_chunk: Sequence[int], model: ModelConfig) -> list[int]:
    """Where each piece begins in the model's list of layers, and behind them the length of the list."""
    front, back = ENDS[model.architecture](model)
    inner = [len(front.names) + layers for layers in accumulate(layers_per_chunk)]
    return [0, *inner[:-1], inner[-1] + len(back.names)]


def plan(run: RunConfig) -> list[Stage]:
    """What each stage of ``run`` holds."""
    of_units, pieces = units(run.model, run.data.seq_length), _pieces(layers_per_chunk(run))
    stages = run.parallel.pipe_stages
    # With two pieces to a stage, the way out is the first half of them, and the way back begins where it turns.
    halves = (pieces[:stages], pieces[: stages - 1 : -1])[: run.parallel.model_chunks // stages]
    return [_stage(pieces_of_stage, of_units) for pieces_of_stage in zip(*halves, strict=True)]


def _pieces(layers_per_chunk: Sequence[int]) -> list[range]:
    """The units of each piece."""
    ends = [1 + layers for layers in accumulate(layers_per_chunk)]
    ends[-1] += 1
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _stage(pieces: tuple[range, ...], units: Sequence[Unit]) -> Stage:
    held = {number for piece in pieces for number in piece}
    parameters = sum(units[number].parameters for number in held)
    if {0, len(units) - 1} <= held:
        parameters -= units[-1].tied
    return Stage(pieces, parameters, sum(units[number].flops for number in held))


def inputs_in_flight(run: RunConfig) -> int:
    """Most transformer layers whose inputs one rank keeps at a time, however small they are.

    Stage n of N, from 0 on, has run N - n micro-batches forward before the first goes backward; with
    DualPipeV a stage has run its pieces 2 N times by then, and the last one once more.
    """
    stages, method = run.parallel.pipe_stages, run.parallel.pipeline_partition
    if method in ("parameters", "flops"):
        # They depend on the vocabulary, which is not read yet; nothing a stage can hold is more than this.
        return (run.parallel.model_chunks + 1) * run.model.num_layers
    layers = layers_per_chunk(run)
    if run.parallel.uses_dualpipev:
        return (2 * stages + 1) * max(layers)
    return max((stages - stage) * count for stage, count in enumerate(layers))
