"""The parameters that each rank holds, tensor by tensor, in the model's order.

h hidden, v padded vocabulary, t tensor-parallel size
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.config import ModelConfig, RunConfig
from megatron.config.architecture import BERT
from megatron.partition import Stage, plan


class Weight(NamedTuple):
    """One parameter as a tensor-parallel rank holds it."""

    name: str
    numel: int
    decays: bool
    """Whether the optimizer's weight decay takes it: matrices, not biases and norms."""


def stage_weights(run: RunConfig, stage: Stage) -> list[Weight]:
    """What a rank of ``stage`` holds; the table of words once, where both ends are on it."""
    held = sorted({number for piece in stage.pieces for number in piece})
    last, t = run.model.num_layers + 1, run.parallel.model_parallel_size
    found: list[Weight] = []
    for number in held:
        if number == last:
            found += _back(run.model, t, tied=0 in held)
        else:
            found += _front(run.model, t) if number == 0 else _layer(run.model, t)
    return found


def numel(weights: Sequence[Weight]) -> int:
    """Elements of all of them."""
    return sum(weight.numel for weight in weights)


def rank_parameters(run: RunConfig) -> list[int]:
    """Elements that one rank of each stage holds."""
    return [numel(stage_weights(run, stage)) for stage in plan(run)]


def _front(model: ModelConfig, t: int) -> list[Weight]:
    h = model.hidden_size
    types = [Weight("tokentype_embeddings.weight", 2 * h, True)] if model.architecture == BERT.name else []
    return [_words(model, t), *types, Weight("position_embeddings.weight", model.max_position_embeddings * h, True)]


def _words(model: ModelConfig, t: int) -> Weight:
    return Weight("word_embeddings.weight", model.padded_vocab_size // t * model.hidden_size, True)


def _back(model: ModelConfig, t: int, *, tied: bool) -> list[Weight]:
    h, words = model.hidden_size, [] if tied else [_words(model, t)]
    if model.architecture != BERT.name:
        return [*_norm("final_layernorm", h), *words]
    return [
        *_norm("final_layernorm", h),
        *_linear("dense", h, h),
        *_norm("layernorm", h),
        *_linear("pooler", h, h),
        *_linear("order", h, 2),
        *words,
        Weight("word_bias", model.padded_vocab_size // t, False),
    ]


@lru_cache(maxsize=64)
def _layer_of(h: int, inner: int, t: int) -> tuple[Weight, ...]:
    return (
        *_norm("input_layernorm", h),
        Weight("attention.query_key_value.weight", 3 * h * h // t, True),
        Weight("attention.query_key_value.bias", 3 * h // t, False),
        Weight("attention.dense.weight", h * h // t, True),
        Weight("attention.dense.bias", h, False),
        *_norm("post_attention_layernorm", h),
        Weight("mlp.dense_h_to_4h.weight", h * inner // t, True),
        Weight("mlp.dense_h_to_4h.bias", inner // t, False),
        Weight("mlp.dense_4h_to_h.weight", h * inner // t, True),
        Weight("mlp.dense_4h_to_h.bias", h, False),
    )


def _layer(model: ModelConfig, t: int) -> tuple[Weight, ...]:
    return _layer_of(model.hidden_size, model.ffn_hidden_size, t)


def _norm(name: str, h: int) -> tuple[Weight, Weight]:
    return Weight(f"{name}.weight", h, False), Weight(f"{name}.bias", h, False)


def _linear(name: str, inputs: int, outputs: int) -> tuple[Weight, Weight]:
    """One that every rank holds whole."""
    return Weight(f"{name}.weight", inputs * outputs, True), Weight(f"{name}.bias", outputs, False)
