"""Model settings: sizes, regularization and kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.config.experts import AdapterConfig, ExpertConfig, as_runs
from megatron.config.fields import count, derived, flag, positive, size
from megatron.config.positions import PositionConfig
from megatron.config.vision import VisionConfig


class Activation(NamedTuple):
    """Memory cost of an activation function of the MLP, in tensors [tokens, f] of the MLP's hidden size f."""

    kept: int
    """Tensors kept for the backward pass, including the output of the activation."""
    gradients: int
    """Gradient tensors held at a time in the backward pass."""
    is_gated: bool = False
    """Whether the MLP multiplies two projections of its input, gate and up."""


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(kept=2, gradients=2),
    "swiglu": Activation(kept=3, gradients=4, is_gated=True),
    "geglu": Activation(kept=4, gradients=2, is_gated=True),
}
"""Activations by the ``ModelConfig`` field that selects them, GELU by default; see ``megatron.ops.activation``."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(VisionConfig, PositionConfig, ExpertConfig, AdapterConfig):
    """Network size, regularization and kernels."""

    model_preset: str | None = flag(
        None, "A published model by name: sizes, --seq-length, kinds of layers; flags override it.", metavar="NAME"
    )
    num_layers: int = flag(
        0,
        "Transformer layers; T5: of the encoder; LLaVA: of the language model.",
        aliases=("encoder-num-layers",),
        within="[1, 20000]",
        required=True,
    )
    decoder_num_layers: int = flag(
        0, "Layers of the decoder (default: as many as the encoder).", within="[1, 20000]", models="t5"
    )
    hidden_size: int = size(0, "Hidden size of the transformer.", required=True)
    num_attention_heads: int = size(
        0, "Number of attention heads.", required=True, multiple_of=("model_parallel_size", "num_query_groups")
    )
    num_query_groups: int = size(
        0,
        "Number of key and value heads: grouped-query attention (default: as many as heads).",
        aliases=("num-key-value-heads",),
        models="gpt",
    )
    group_query_attention: bool = flag(
        False, "Grouped-query attention; --num-query-groups selects it.", models="gpt", needs="num_query_groups"
    )
    kv_channels: int = size(0, "Size of a head (default: hidden size / heads).")
    ffn_hidden_size: int = flag(
        0,
        "Hidden size of the MLP (default: 4 x hidden size; if gated two thirds of it, in multiples of 64).",
        within="[1, 8388608]",
        multiple_of="model_parallel_size",
    )
    swiglu: bool = flag(
        False, "Gate the MLP with SiLU: SiLU(gate) x up.", models="gpt", excludes=("openai_gelu", "bias_gelu_fusion")
    )
    geglu: bool = flag(False, "Gate the MLP with GELU: GELU(gate) x up.", models="t5", excludes=("bias_gelu_fusion",))
    normalization: str = flag("LayerNorm", "Kind of the norms.", choices=("LayerNorm", "RMSNorm"), models="gpt t5")
    qk_layernorm: bool = flag(False, "Normalize the queries and keys of each head, before RoPE (Qwen3).", models="gpt")
    disable_bias_linear: bool = flag(False, "Linear layers without biases.", models="gpt t5")
    add_qkv_bias: bool = flag(
        False, "A bias for queries, keys and values in spite of --disable-bias-linear (Qwen2).", models="gpt"
    )
    untie_embeddings_and_output_weights: bool = flag(False, "A separate output projection.", models="gpt t5")
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", within="[1, 1073741824]"
    )
    layernorm_epsilon: float = positive(1e-5, "Epsilon of the layer norms.", aliases=("norm-epsilon",))
    apply_residual_connection_post_layernorm: bool = flag(
        False, "Take the residual from the output of the layer norm, not from its input.", models="gpt bert other"
    )
    openai_gelu: bool = flag(False, "Use OpenAI's GELU, the tanh approximation, as Megatron-LM's fused kernel does.")
    bias_gelu_fusion: bool = flag(False, "Fuse bias and GELU of the MLP into one kernel (torch.compile).")
    bias_dropout_fusion: bool = flag(False, "Fuse bias, dropout and residual addition (torch.compile).")
    compile: bool = flag(
        False,
        "Compile each transformer layer (torch.compile), which takes seconds at the start.",
        models="gpt bert other",
        excludes={"tiled_mlp": "torch's compiler cannot look into a backward pass inside another"},
    )
    tiled_mlp: bool = flag(
        False, "Compute the MLP on a part of the tokens at a time, forward and backward (arXiv 2506.13996)."
    )
    recompute_mlp_activation: bool = flag(
        False,
        "Recompute the activation of MLPs, such as SwiGLU, in the backward pass.",
        excludes={
            "compile": "torch's compiler chooses what to recompute",
            "tiled_mlp": "it recomputes the complete MLP",
            "bias_gelu_fusion": "the activation is a part of the linear layer",
            "num_experts": "activations of experts are not recomputed",
            "lora_rank": "frozen layers keep no input",
        },
    )
    tiled_mlp_num_shards: int = count(
        0, "Tiles of --tiled-mlp (default: of --hidden-size tokens each).", needs="tiled_mlp"
    )
    gradient_accumulation_fusion: bool = flag(
        False,
        "Accumulate weight gradients inside the matmul that computes them.",
        needs={"gradient_accumulation_steps": "it adds the gradients of micro-batches"},
        excludes={
            "compile": "torch's compiler cannot trace gradients that are accumulated in place",
            "grad_accum_dtype=fp32": "gradients are added up in the type of the weights",
            "zero_stage=2|3 or offload_optimizer": "gradients are moved before a step ends",
        },
    )
    fp8_format: str = flag(
        "none",
        "Compute the linear layers in FP8: e4m3, with gradients in e5m2 (hybrid) or e4m3.",
        choices=("none", "hybrid", "e4m3"),
        needs={"bf16": "weights stay in bf16, and are quantized when they are used"},
    )
    fp8_recipe: str = flag(
        "tensorwise",
        "Scales of FP8: one for a tensor, or one for each row.",
        choices=("tensorwise", "rowwise"),
        needs="fp8_format",
    )
    fp8_min_size: int = flag(
        1024,
        "Smallest number of inputs and outputs of a linear layer in FP8; others stay in bf16.",
        within="[16, inf)",
        needs="fp8_format",
    )
    fused_kernels: str = flag(
        "auto",
        "Implementation of layer norm and Adam; auto: apex if available, or torch.",
        choices=("auto", "apex", "torch"),
    )
    attention_dropout: float = flag(0.1, "Dropout probability of the attention weights.", within="[0, 1)")
    hidden_dropout: float = flag(0.1, "Dropout probability of the hidden states.", within="[0, 1)")
    init_method_std: float = positive(0.02, "Standard deviation of the initial weights.")
    apply_query_key_layer_scaling: bool = flag(
        False,
        "Scale attention scores by 1 / layer number, and undo it in fp32, to avoid fp16 overflow.",
        switches={"no-query-key-layer-scaling": False},
        models="gpt bert other",
    )
    attention_softmax_in_fp32: bool = flag(False, "Compute attention scores and their softmax in fp32.")
    fp16_lm_cross_entropy: bool = flag(
        False, "Compute the cross entropy in the model's half precision instead of fp32.", needs="bf16 or fp16"
    )
    use_cpu_initialization: bool = flag(
        False, "Initialize weights on the CPU, so that they are the same on any device."
    )
    shape_order: str = flag(
        "BSH", "Order of hidden states: batch, sequence, hidden size.", choices=("BSH", "SBH"), models="gpt bert other"
    )
    pre_tokens: int = flag(
        65536,
        "Preceding tokens that each token attends to, a sliding window; also as N,0. The default limits no sequence.",
        aliases=("pre-tockens", "pre", "window-size"),
        within="[0, inf)",
        models="gpt",
    )
    fp32_residual_connection: bool = flag(
        False, "Residual connection of half-precision models in fp32.", models="gpt bert other", needs="bf16 or fp16"
    )
    architecture: str = derived("GPT-2")
    """Name of the model's spec in ``megatron.model.spec.ARCHITECTURES``."""
    vocab_size: int = derived(0)
    """Number of tokens of the tokenizer."""
    padded_vocab_size: int = derived(0)
    """Rows of the embedding; rows from ``vocab_size`` on are excluded from the loss."""
    eod_token: int = derived(-1)
    """Token that ends a document."""
    reset_position_ids: bool = derived(False)
    reset_attention_mask: bool = derived(False)
    pre_tokens_given: bool = derived(False)
    """Whether ``pre_tokens`` was given: its default, which is less than some models have, limits no sequence."""
    dtype: str = derived("fp32")
    """Type of weights and activations: fp32, bf16 or fp16."""
    recomputes_attention: bool = derived(False)
    """Whether the backward pass recomputes only the attention core."""
    seed: int = derived(1234)
    encoder_num_layers: int = derived(0)
    """Layers of the encoder, of ``num_layers`` in all; 0 for a model without encoder and decoder."""
    encoder_seq_length: int = derived(0)
    decoder_seq_length: int = derived(0)
    decoder_start_token: int = derived(-1)
    """Token that the decoder of an encoder-decoder model reads first."""
    quick_gelu: bool = derived(False)
    """Whether GELU is approximated as x sigmoid(1.702 x), as CLIP does."""
    classes: tuple[str, ...] = derived(())
    """Names of the classes of a classifier, in the order of its outputs."""

    @property
    def sequence_dim(self) -> int:
        """Dimension of the sequence in hidden states: [b, s, h], or [s, b, h] with ``--shape-order SBH``."""
        return 0 if self.shape_order == "SBH" else 1

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def has_window(self) -> bool:
        """Whether ``pre_tokens`` limits attention."""
        is_window = self.pre_tokens_given or self.pre_tokens != ModelConfig.pre_tokens
        return is_window and self.pre_tokens < self.max_position_embeddings - 1

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    def can_share_heads(self, ranks: int) -> bool:
        """Whether each of ``ranks`` gets complete query groups, or an equal part of the rows of one group."""
        groups, heads = max(self.query_groups, 1), self.num_attention_heads
        rows = (heads // groups + 2) * self.head_size
        return groups % ranks == 0 or (ranks % groups == 0 and heads % ranks == 0 and rows % (ranks // groups) == 0)

    @property
    def language_model(self) -> "ModelConfig":
        """The config of the language model without the vision encoder; layers are numbered from 1."""
        return replace(self, architecture="GPT-2", num_layers=self.num_layers - self.vision_layers, vision_num_layers=0)

    @property
    def vision_model(self) -> "ModelConfig":
        """The config of the vision encoder: transformer layers with layer norms and biases, without dropout."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return ModelConfig(
            **shared,
            hidden_size=self.vision_hidden_size,
            num_attention_heads=self.vision_num_attention_heads,
            ffn_hidden_size=self.vision_ffn_hidden_size,
            layernorm_epsilon=self.vision_layernorm_epsilon,
            openai_gelu=self.vision_encoder == "siglip",
            quick_gelu=self.vision_encoder == "clip",
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )

    def layer_has_experts(self, layer_number: int) -> bool:
        """Whether a transformer layer has a mixture of experts; numbers start at 1, vision encoder included."""
        language_layer = layer_number - self.vision_layers
        return language_layer > 0 and super().layer_has_experts(language_layer)

    @property
    def activation(self) -> str:
        """The MLP's activation function, a key of ``ACTIVATIONS``."""
        return next((name for name in ACTIVATIONS if getattr(self, name, False)), "gelu")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies two projections of its input, gate and up."""
        return ACTIVATIONS[self.activation].is_gated

    def mlp_tiles(self, tokens: int) -> int:
        """Number of tiles of an MLP for ``tokens`` tokens of a micro-batch on a rank."""
        if not self.tiled_mlp:
            return 1
        largest = -(-tokens // (self.tiled_mlp_num_shards or -(-tokens // self.hidden_size)))
        return -(-tokens // largest)

    @property
    def expert_size(self) -> int:
        """Hidden size of each expert; 0 without experts."""
        return (self.moe_ffn_hidden_size or self.ffn_hidden_size) if self.has_experts else 0

    @property
    def expert_layers(self) -> str:
        """Which layers have experts, written as a list of ``--moe-layer-freq``; empty without experts."""
        return as_runs([self.layer_has_experts(n + 1) for n in range(self.num_layers)]) if self.has_experts else ""

    @property
    def layers_need_segment_ids(self) -> bool:
        """Whether attention is limited to documents, or RoPE positions restart at each document."""
        return self.reset_attention_mask or (self.reset_position_ids and self.has_rotary_embedding)

    @property
    def linear_bias(self) -> bool:
        """Whether linear layers have a bias; for queries, keys and values see ``qkv_bias``."""
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        """Whether the projection to queries, keys and values has a bias."""
        return self.linear_bias or self.add_qkv_bias


_SHARED = (
    *("architecture", "num_layers", "init_method_std", "use_cpu_initialization", "seed", "dtype", "fused_kernels"),
    *("compile", "bias_dropout_fusion", "gradient_accumulation_fusion", "recomputes_attention"),
    *("fp8_format", "fp8_recipe", "fp8_min_size"),
)
"""Settings that the vision encoder shares with the language model."""


def default_ffn_hidden_size(model: ModelConfig) -> int:
    """Four times the hidden size; two thirds of it, in multiples of 64, for a gated MLP, which has a third matrix."""
    return max(int(4 * model.hidden_size * 2 / 3 / 64), 1) * 64 if model.is_gated else 4 * model.hidden_size


def padded_vocabulary(v: int, t: int, multiple: int = 128) -> int:
    """The vocabulary size ``v`` rounded up to a multiple of ``multiple`` times the tensor-parallel size ``t``."""
    return -(-v // (multiple * t)) * multiple * t
