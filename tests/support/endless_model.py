"""A GPT-2 folder as Hugging Face writes it, of a model that never comes to an end by itself."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor

HIDDEN, LAYERS, POSITIONS = 16, 2, 200_000
EOD = 256
"""Of a vocabulary of the 256 bytes and the end of document."""


def write_endless_model(folder: Path) -> None:
    """Weights are drawn at random, but for the end of document, which is never the next token.

    As many tokens as it has positions take minutes.
    """
    folder.mkdir()
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": EOD + 1,
        "n_positions": POSITIONS,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 2,
        "bos_token_id": EOD,
        "eos_token_id": EOD,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.5

    weights = {"wte.weight": drawn(EOD + 1, HIDDEN), "wpe.weight": drawn(POSITIONS, HIDDEN)}
    for layer in range(LAYERS):
        shapes = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN)}
        shapes |= {"mlp.c_fc": (HIDDEN, 4 * HIDDEN), "mlp.c_proj": (4 * HIDDEN, HIDDEN)}
        for name, shape in shapes.items():
            weights |= {f"h.{layer}.{name}.weight": drawn(*shape), f"h.{layer}.{name}.bias": drawn(shape[1])}
        for name in ("ln_1", "ln_2"):
            weights |= {f"h.{layer}.{name}.weight": 1 + drawn(HIDDEN), f"h.{layer}.{name}.bias": drawn(HIDDEN)}
    # What comes out of the last norm has 10 in its first place, and of all tokens one alone looks there.
    weights |= {"ln_f.weight": torch.ones(HIDDEN), "ln_f.bias": torch.zeros(HIDDEN)}
    weights["ln_f.bias"][0], weights["ln_f.weight"][0] = 10, 0
    weights["wte.weight"][:, 0] = 0
    weights["wte.weight"][EOD, 0] = -10
    return {f"transformer.{name}": tensor for name, tensor in weights.items()}
