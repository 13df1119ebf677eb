"""Published models by name: the flags that ``--model-preset`` and the planner's ``--model`` stand for. No torch here.

The sizes and the numbers of ``parameters`` are the published ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GPT2_PROGRAM, BERT_PROGRAM, VLM_PROGRAM = "pretrain_gpt2.py", "pretrain_bert.py", "pretrain_vlm.py"


@dataclass(frozen=True)
class Preset:
    """Flags of a published model, and facts without a flag."""

    flags: Mapping[str, Any]
    """Config field to its value."""
    vocab_size: int
    """Rows of the published token embedding. In a run the tokenizer determines the vocabulary size."""
    parameters: int | None = None
    """Published number of parameters, if there is one."""
    program: str = GPT2_PROGRAM
    """The entry script that trains it."""


def preset_arguments(name: str) -> list[str]:
    """The command-line arguments that a preset stands for."""
    arguments: list[str] = []
    for field, value in PRESETS[name].flags.items():
        flag = "--" + field.replace("_", "-")
        arguments += [] if value is False else [flag] if value is True else [flag, str(value)]
    return arguments


def _sizes(layers: int, hidden: int, heads: int, seq_length: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": seq_length}


def _gpt(layers: int, hidden: int, heads: int, seq_length: int = 2048, parameters: int | None = None) -> Preset:
    """GPT models (arXiv 1909.08053 and 2104.04473); OpenAI's GPT-2 has sequences of 1,024 tokens."""
    return Preset(_sizes(layers, hidden, heads, seq_length), 50257, parameters)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    seq_length: int,
    vocab_size: int,
    parameters: int,
    *,
    tied: bool = False,
    **more: Any,
) -> Preset:
    """Llama's layers (arXiv 2302.13971): RMSNorm, SwiGLU, rotary positions, no biases, no dropout; ``more`` differs."""
    given = {
        **_sizes(layers, hidden, heads, seq_length),
        "ffn_hidden_size": ffn,
        "max_position_embeddings": seq_length,
        "num_query_groups": heads,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_base": 10000.0,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **more,
    }
    return Preset(given, vocab_size, parameters)


def _llama3(
    layers: int, hidden: int, heads: int, ffn: int, parameters: int, *, factor: float = 8.0, tied: bool = False
) -> Preset:
    """Llama 3 (arXiv 2407.21783): 8 query groups, trained on 8,192 tokens and extended to 131,072."""
    rope: dict[str, Any] = {"rotary_base": 500000.0, "use_rope_scaling": True, "rope_scaling_factor": factor}
    sizes = (layers, hidden, heads, ffn, 8192, 128256, parameters)
    return _llama(*sizes, tied=tied, num_query_groups=8, max_position_embeddings=131072, **rope)


def _qwen2(
    layers: int, hidden: int, heads: int, ffn: int, groups: int, parameters: int, *, tied: bool = False
) -> Preset:
    """Qwen2.5 (arXiv 2412.15115): biases for Q, K and V. Small models pad the vocabulary less."""
    sizes = (layers, hidden, heads, ffn, 4096, 151936 if tied else 152064, parameters)
    flags: dict[str, Any] = {"rotary_base": 1e6, "add_qkv_bias": True, "layernorm_epsilon": 1e-6}
    return _llama(*sizes, tied=tied, num_query_groups=groups, max_position_embeddings=32768, **flags)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, parameters: int, *, tied: bool = False) -> Preset:
    """Qwen3 (arXiv 2505.09388): head size 128 for any hidden size, with QK-norm."""
    sizes = (layers, hidden, heads, ffn, 4096, 151936, parameters)
    flags: dict[str, Any] = {"rotary_base": 1e6, "kv_channels": 128, "qk_layernorm": True, "layernorm_epsilon": 1e-6}
    return _llama(*sizes, tied=tied, num_query_groups=8, max_position_embeddings=40960, **flags)


def _llava(
    language: Preset, encoder: tuple[str, int, int, int, int, int, int], token: int, parameters: int | None = None,
    *, seq_length: int, vocab_size: int = 0, **more: Any,
) -> Preset:  # fmt: skip
    """A language model with a vision ``encoder``: (kind, layers, hidden, MLP, heads, image size, patch size)."""
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "image_size", "patch_size")
    kind, *numbers = encoder
    flags: dict[str, Any] = {f"vision_{name}": number for name, number in zip(sizes, numbers, strict=True)}
    flags |= {"vision_encoder": kind, "image_token_id": token}
    if kind == "siglip":
        flags |= {"vision_layernorm_epsilon": 1e-6, "vision_feature_layer": -1}
        flags |= {"vision_feature_select_strategy": "full"}
    rows = vocab_size or language.vocab_size
    return Preset({**language.flags, "seq_length": seq_length, **flags, **more}, rows, parameters, VLM_PROGRAM)


_CLIP_LARGE = ("clip", 24, 1024, 4096, 16, 336, 14)
"""arXiv 2103.00020, as LLaVA-1.5 (arXiv 2310.03744) uses it."""
_SIGLIP_LARGE = ("siglip", 26, 1152, 4304, 16, 384, 14)
_SIGLIP_BASE = ("siglip", 12, 768, 3072, 12, 224, 16)
"""arXiv 2303.15343."""
_VICUNA_7B = _llama(32, 4096, 32, 11008, 4096, 32064, 0)
_VICUNA_13B = _llama(40, 5120, 40, 13824, 4096, 32064, 0)
_QWEN2_SMALL = _qwen2(24, 896, 14, 4864, 2, 494_032_768, tied=True)
_SMOLLM2 = _llama(30, 576, 9, 1536, 8192, 49152, 134_515_008, tied=True, num_query_groups=3, rotary_base=100000.0)
_MISTRAL: dict[str, Any] = {"num_query_groups": 8, "max_position_embeddings": 32768, "pre_tokens": 4095}

PRESETS: dict[str, Preset] = {
    "gpt2": _gpt(12, 768, 12, 1024, 124_439_808),
    "gpt2-medium": _gpt(24, 1024, 16, 1024, 354_823_168),
    "gpt2-large": _gpt(36, 1280, 20, 1024, 774_030_080),
    "gpt2-xl": _gpt(48, 1600, 25, 1024, 1_557_611_200),
    "345m": _gpt(24, 1024, 16, 1024),
    "1.3b": _gpt(24, 2048, 16),
    "13b": _gpt(40, 5120, 40),
    "175b": _gpt(96, 12288, 96),
    "1t": _gpt(128, 25600, 160),
    "bert-base": Preset(_sizes(12, 768, 12, 512), 30522, program=BERT_PROGRAM),
    "bert-large": Preset(_sizes(24, 1024, 16, 512), 30522, program=BERT_PROGRAM),
    "llama2-7b": _llama(32, 4096, 32, 11008, 4096, 32000, 6_738_415_616),
    "llama2-13b": _llama(40, 5120, 40, 13824, 4096, 32000, 13_015_864_320),
    "llama2-70b": _llama(80, 8192, 64, 28672, 4096, 32000, 68_976_648_192, num_query_groups=8),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336, 8_030_261_248),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672, 70_553_706_496),
    "llama3.1-405b": _llama3(126, 16384, 128, 53248, 405_853_388_800),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, 1_235_814_400, factor=32.0, tied=True),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, 3_212_749_824, factor=32.0, tied=True),
    "mistral-7b": _llama(32, 4096, 32, 14336, 8192, 32000, 7_241_732_096, **_MISTRAL),
    "qwen2.5-0.5b": _QWEN2_SMALL,
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 8960, 2, 1_543_714_304, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 18944, 4, 7_615_616_512),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 13824, 8, 14_770_033_664),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 27648, 8, 32_763_876_352),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 29568, 8, 72_706_203_648),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, 596_049_920, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, 1_720_574_976, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, 4_022_468_096, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, 8_190_735_360),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, 14_768_307_200),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, 32_762_123_264),
    "smollm2-135m": _SMOLLM2,
    "llava-1.5-7b": _llava(_VICUNA_7B, _CLIP_LARGE, 32000, 7_063_427_072, seq_length=2048),
    "llava-1.5-13b": _llava(_VICUNA_13B, _CLIP_LARGE, 32000, 13_351_494_656, seq_length=2048),
    "siglip-qwen2.5-0.5b": _llava(_QWEN2_SMALL, _SIGLIP_LARGE, 151665, 893_617_312, seq_length=2048),
    "siglip-smollm2-222m": _llava(_SMOLLM2, _SIGLIP_BASE, 49152, 221_161_152, seq_length=1024, vocab_size=49280),
}
