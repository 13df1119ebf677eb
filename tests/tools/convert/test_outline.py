"""The weights of each model by name, without the model."""

from dataclasses import replace

import pytest

from megatron.config import ModelConfig
from megatron.model.architectures import ARCHITECTURES, architecture_of
from megatron.tools.convert.outline import outline

SIZES = {"num_layers": 3, "hidden_size": 12, "num_attention_heads": 2, "ffn_hidden_size": 20}
CONFIG = ModelConfig(**SIZES, max_position_embeddings=6, vocab_size=10, padded_vocab_size=16)


def _parameters(config: ModelConfig) -> list[tuple]:
    from megatron.config import ActivationConfig, ParallelConfig
    from megatron.model.containers import SequentialModel
    from megatron.parallel.layout import ParallelLayout

    spec, layout = architecture_of(config), ParallelLayout.create(ParallelConfig())
    model = SequentialModel(spec.build_layers(config, layout), spec.build_loss(config, layout), ActivationConfig())
    return [
        (name, tuple(weight.shape), getattr(weight, "partition_dim", None)) for name, weight in model.named_parameters()
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_that_of_the_model(run_ranks, architecture):
    config = replace(CONFIG, architecture=architecture)
    (expected,) = run_ranks(1, _parameters, config)
    found = [
        (name, tuple(weight.shape), getattr(weight, "partition_dim", None))
        for name, weight in outline(config).named_parameters()
    ]
    assert found == expected
