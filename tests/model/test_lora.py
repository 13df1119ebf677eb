"""Adapters: merged weights equal them, and peft computes the same from the exported folder.

That they train alike on every layout is shown by tests/training/test_adapter_training.py.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from megatron.checkpoint.huggingface import joined
from megatron.common.errors import CheckpointError, ConfigError, ResourceError
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines.build import freeze
from megatron.engines.containers import SequentialModel, sequential_model
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import config_of as read_config
from megatron.model.huggingface import source_shapes
from megatron.parallel.layout import ParallelLayout
from megatron.tools.convert.full_model import FullModel
from megatron.tools.convert.lora import merge_adapters, write_peft

TOKENS = torch.randint(0, 53, (2, 12), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.full(TOKENS.shape, 1 / TOKENS.numel())
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16, "vocab_size": 53}
LORA = {"lora_rank": 3, "lora_alpha": 7.0}
LLAMA = {
    "num_query_groups": 2, "ffn_hidden_size": 48, "swiglu": True, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MODELS = {
    "gpt2": ModelConfig(**SIZES, **LORA, ffn_hidden_size=128),
    "llama": ModelConfig(**SIZES, **LORA, **LLAMA),
    "two layers": ModelConfig(**SIZES, **LORA, **LLAMA, lora_target=("query_key_value", "down_proj")),
}


def built(config: ModelConfig, layout: ParallelLayout, weights: dict[str, Tensor] | None = None) -> SequentialModel:
    """The model with random adapters, or this rank's shards of ``weights``; only adapters are trained."""
    t = layout.tensor_group.size()
    config = replace(
        config, padded_vocab_size=-(-53 // t) * t, attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.2
    )
    model = sequential_model(config, ActivationConfig(), layout)
    specs = architecture_of(config).named_parameters(config)
    assert [*specs] == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        whole = weights[name] if weights else torch.randn(specs[name].shape, generator=generator)
        if weights is not None or ".lora.B" in name:
            dim = specs[name].shard_dim
            if specs[name].is_vocabulary:
                whole = torch.nn.functional.pad(whole[:53], (0, 0, 0, config.padded_vocab_size - 53))
            parameter.data.copy_(whole if dim is None else whole.chunk(t, dim)[layout.tensor_group.rank()])
    freeze(model, config)
    return model.train()


def logits_of(config: ModelConfig, weights: dict[str, Tensor]) -> Tensor:
    """Logits of one process."""
    return built(config, ParallelLayout.create(ParallelConfig()), weights)(TOKENS).detach()[..., :53]


def whole_weights(config: ModelConfig) -> dict[str, Tensor]:
    """The weights of ``built``."""
    model = built(config, ParallelLayout.create(ParallelConfig()))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_compute_what_adapters_do(run_ranks, name: str) -> None:
    (weights,) = run_ranks(1, whole_weights, MODELS[name])
    model = FullModel(MODELS[name], weights, None)
    plain = merge_adapters(model, Path("ck"))
    huge = {name: weight + 1e30 if ".lora." in name else weight for name, weight in weights.items()}
    with pytest.raises(CheckpointError, match=r"^ck: .*weight with its adapter is from "):
        merge_adapters(FullModel(MODELS[name], huge, None), Path("ck"))
    assert plain.config.lora_rank == 0 and not any(".lora." in weight for weight in plain.weights)
    (found,) = run_ranks(1, logits_of, plain.config, plain.weights)
    (expected,) = run_ranks(1, logits_of, MODELS[name], weights)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", [(), ("q_proj", "k_proj", "v_proj", "dense_4h_to_h")])
def test_peft_computes_the_same(run_ranks, tmp_path: Path, targets: tuple[str, ...]) -> None:
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 53, "max_position_embeddings": 16, "initializer_range": 0.1}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, **more)).float()
    config = replace(read_config(theirs.config.to_dict(), Path("config.json")), **LORA, lora_target=targets)
    state = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    names = source_shapes(replace(config, lora_rank=0))
    weights = {name: joined(name, [state[source] for source in sources], config) for name, sources in names.items()}
    specs = architecture_of(config).named_parameters(config)
    weights = {name: weights.get(name, 0.3 * torch.randn(spec.shape)) for name, spec in specs.items()}
    write_peft(tmp_path / "adapter", FullModel(config, weights, None), None)
    for name, other in (("base", {}), ("wide", {"hidden_size": 64}), ("deep", {"num_hidden_layers": 3})):
        LlamaConfig(**sizes | other, **more).save_pretrained(tmp_path / name)
    write_peft(tmp_path / "named", FullModel(config, weights, None), str(tmp_path / "base"))
    problems = {
        "wide": r": model\.layers\.0\.\S+ is \[64, 48\], and .* \[32, 48\]",
        "deep": " has 3 layers, and .* has 2",
    }
    for name, problem in problems.items():
        with pytest.raises(ConfigError, match=name + problem):
            write_peft(tmp_path / "none", FullModel(config, weights, None), str(tmp_path / name))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ResourceError, match="and the disk has 9 free"):
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
        write_peft(tmp_path / "none", FullModel(config, weights, None), None)
    assert not (tmp_path / "none").exists()
    loaded = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    (ours,) = run_ranks(1, logits_of, config, weights)
    with torch.no_grad():
        base, adapted = loaded.get_base_model()(TOKENS).logits, loaded(TOKENS).logits
    assert_close(ours, adapted, rtol=1e-5, atol=1e-5)
    with loaded.disable_adapter(), torch.no_grad():
        assert (base - loaded(TOKENS).logits).abs().max() > 0.1
