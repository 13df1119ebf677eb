"""Models of the Llama family against Hugging Face's: the same logits, and the same gradient of every weight."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.checkpoint.huggingface import divided, joined
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.config.huggingface.llama import read_config, source_shapes, write_config
from megatron.config.model import padded_vocabulary
from megatron.model.gpt2 import GPT2Model
from megatron.model.rotary import RotaryEmbedding
from megatron.parallel.layout import ParallelLayout

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "llama": {"num_key_value_heads": 4, "rope_parameters": LLAMA3},
    "llama with biases": {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 7},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
TOKENS = torch.randint(0, 53, (2, 24), generator=torch.Generator().manual_seed(1))


def hugging_face(name: str) -> torch.nn.Module:
    """A small random model in fp32, its norms and biases random, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.split()[0]
    settings = {**SIZES, "tie_word_embeddings": False, **MODELS[name]}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.3)
    return model.float().train()


class Reference(NamedTuple):
    """What Hugging Face's model computes of TOKENS, in our names: the logits, and the gradient of every weight."""

    config: ModelConfig
    weights: dict[str, Tensor]
    logits: Tensor
    gradients: dict[str, Tensor]


def _reference(name: str) -> Reference:
    model = hugging_face(name)
    config = replace(read_config(model.config.to_dict(), Path("config.json")), attention_dropout=0.0)
    logits = model(TOKENS).logits
    F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten()).backward()
    state = {key: (parameter.detach(), parameter.grad) for key, parameter in model.named_parameters()}
    weights, gradients = (
        {
            ours: joined(ours, [state[theirs][part] for theirs in sources], config)
            for ours, sources in source_shapes(config).items()
        }
        for part in range(2)
    )
    return Reference(config, weights, logits.detach(), gradients)


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """One of each model."""
    return {name: _reference(name) for name in MODELS}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_and_gradients_are_those_of_transformers(run_ranks, references, size):
    run_ranks(size, compare, references if size != 2 else {name: references[name] for name in ("llama", "qwen3")})


def compare(references: dict[str, Reference]):
    """Each model on this rank, with and without sequence parallelism, against its reference."""
    size = dist.get_world_size()
    for name, reference in references.items():
        for sequence_parallel in (False, True) if size > 1 else (False,):
            parallel = ParallelConfig(model_parallel_size=size, world_size=size, sequence_parallel=sequence_parallel)
            _compare(name, reference, ParallelLayout.create(parallel))


def _compare(name: str, reference: Reference, layout: ParallelLayout):
    rows = padded_vocabulary(reference.config.vocab_size, dist.get_world_size(), 1)
    config = replace(reference.config, padded_vocab_size=rows)
    model = GPT2Model(config, ActivationConfig(), layout)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == reference.weights.keys(), name
    for key, parameter in parameters.items():
        parameter.data.copy_(_shard(key, reference.weights[key], parameter, rows))
    whole = torch.cat(_gathered(model(TOKENS), layout), -1)[..., : config.vocab_size]
    assert_close(whole, reference.logits, rtol=1e-5, atol=1e-5)
    labels = TOKENS.roll(-1, 1)
    model(TOKENS, (labels, torch.full(labels.shape, 1 / labels.numel()))).backward()
    for key, parameter in parameters.items():
        expected = _shard(key, reference.gradients[key], parameter, rows)
        assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{name} {key}: {text}")


def _shard(key: str, whole: Tensor, parameter: torch.nn.Parameter, rows: int) -> Tensor:
    """This rank's part of a whole weight or gradient."""
    dim, whole = getattr(parameter, "partition_dim", None), _padded(key, whole, rows)
    return whole if dim is None else whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _padded(key: str, whole: Tensor, rows: int) -> Tensor:
    is_vocabulary = "word_embeddings" in key or whole.size(0) == SIZES["vocab_size"]
    return F.pad(whole, (0, 0, 0, rows - whole.size(0))) if is_vocabulary else whole


def _gathered(part: Tensor, layout: ParallelLayout) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous(), group=layout.tensor_group)
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_config_and_weights_return_unchanged(references, name: str) -> None:
    """config.json and every weight are the same after a conversion to theirs and back."""
    config, weights = references[name].config, references[name].weights
    written = write_config(config, "float32")
    assert written["model_type"] == name.split()[0]
    assert read_config(written, Path("config.json")) == config
    for key, sources in source_shapes(config).items():
        theirs = divided(key, weights[key], config)
        assert len(theirs) == len(sources) and joined(key, theirs, config).equal(weights[key]), key


def test_llama31_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=LLAMA3)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    rotary = RotaryEmbedding(128, 500000.0, 8.0)
    assert_close(rotary.frequencies(torch.device("cpu")), expected, rtol=1e-6, atol=0)
