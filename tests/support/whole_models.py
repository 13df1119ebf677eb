"""Models in one piece: what a checkpoint's weights compute, and made-up weights."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig

if TYPE_CHECKING:
    from megatron.engines.containers import SequentialModel

SMALL_GPT2 = ModelConfig(
    num_layers=3, hidden_size=16, ffn_hidden_size=64, num_attention_heads=4, max_position_embeddings=12, vocab_size=21,
    padded_vocab_size=24, eod_token=4, attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.3,
)  # fmt: skip
"""For comparisons with other ways to compute the same: its weights are wide enough to matter."""
TOKENS = torch.tensor([[3, 90, 41, 7, 0, 91, 12, 12], [60, 1, 2, 3, 4, 5, 6, 7]])


def logits_and_weights(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """What the model makes of ``TOKENS`` with the newest checkpoint of ``folder``, and its weights."""
    model = loaded_model(folder)
    with torch.no_grad():
        logits = model.eval()(TOKENS)
    return logits, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole_model(config: ModelConfig, activation: ActivationConfig | None = None) -> "SequentialModel":
    """A model without tensor and pipeline parallelism, for a test of one rank."""
    from megatron.engines.containers import sequential_model
    from megatron.parallel.layout import ParallelLayout

    return sequential_model(config, activation or ActivationConfig(), ParallelLayout.create(ParallelConfig()))


def loaded_model(folder: Path) -> "SequentialModel":
    """The same with the weights of the newest checkpoint of ``folder``."""
    from megatron.checkpoint.tracker import newest

    saved = newest(folder)
    load_weights(model := whole_model(saved.full_model_config()), saved)
    return model


def load_weights(module: nn.Module, saved) -> None:
    """Load the weights of a checkpoint into a model without tensor or pipeline parallelism."""
    from megatron.tools.convert.load_and_save import lazy_weights

    parameters = dict(module.named_parameters())
    for name, weight in lazy_weights(saved).items():
        with torch.no_grad():
            parameters[name].copy_(weight)


def made_up_weights(config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    """Every weight drawn at random, biases and norms too, so that none can be mistaken for another."""
    from megatron.model.architectures import architecture_of

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator) * 0.2
        for name, spec in architecture_of(config).named_parameters(config).items()
    }


def write_gpt2(folder: Path, std: float, **sizes: int) -> Path:
    """``folder``, in which Hugging Face has written a GPT-2 of 4 heads; every weight is drawn at random."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, std)
    model.save_pretrained(folder)
    return folder
