"""The weights of GPT2Model by name, without the model."""

from megatron.checkpoint.exchange.outline import outline
from megatron.config import ModelConfig

SIZES = {"num_layers": 3, "hidden_size": 12, "num_attention_heads": 2, "ffn_hidden_size": 20}
CONFIG = ModelConfig(**SIZES, max_position_embeddings=6, vocab_size=10, padded_vocab_size=16)


def _parameters(config: ModelConfig) -> list[tuple]:
    from megatron.config import ActivationConfig, ParallelConfig
    from megatron.model.gpt2_model import GPT2Model
    from megatron.mpu.layout import ParallelLayout

    model = GPT2Model(config, ActivationConfig(), ParallelLayout.create(ParallelConfig()))
    return [
        (name, tuple(weight.shape), getattr(weight, "partition_dim", None)) for name, weight in model.named_parameters()
    ]


def test_it_is_that_of_the_model(run_ranks):
    (expected,) = run_ranks(1, _parameters, CONFIG)
    found = [
        (name, tuple(weight.shape), getattr(weight, "partition_dim", None))
        for name, weight in outline(CONFIG).named_parameters()
    ]
    assert found == expected
