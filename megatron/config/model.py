"""The model: its sizes, regularization and kernels."""

from dataclasses import dataclass

from megatron.config.fields import derived, flag


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network size, regularization and kernels."""

    num_layers: int = flag(0, "Number of transformer layers.", within="[1, inf)", required=True)
    hidden_size: int = flag(0, "Hidden size of the transformer.", within="[1, inf)", required=True)
    num_attention_heads: int = flag(0, "Number of attention heads.", within="[1, inf)", required=True)
    ffn_hidden_size: int = flag(0, "Hidden size of the MLP (default: 4 x hidden size).", within="[1, inf)")
    max_position_embeddings: int = flag(
        0, "Number of learned position embeddings (default: the sequence length).", within="[1, inf)"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary size to a multiple of this value times the tensor-parallel size.", within="[1, inf)"
    )
    layernorm_epsilon: float = flag(1e-5, "Epsilon of the layer norms.", aliases=("norm-epsilon",), within="(0, inf)")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "Use the output of the layer norm for the residual connection, instead of its input."
    )
    openai_gelu: bool = flag(False, "Use OpenAI's GELU, the tanh approximation.")
    bias_gelu_fusion: bool = flag(
        False,
        "Fuse bias and GELU of the MLP into one kernel (torch.compile).",
        switches={"no-bias-gelu-fusion": False},
    )
    bias_dropout_fusion: bool = flag(
        False,
        "Fuse bias, dropout and residual addition into one kernel (torch.compile).",
        switches={"no-bias-dropout-fusion": False},
    )
    compile: bool = flag(
        False, "Compile each transformer layer (torch.compile), which takes up to a minute at the start."
    )
    gradient_accumulation_fusion: bool = flag(
        False,
        "Accumulate weight gradients over micro-batches inside the matrix multiplication that computes them.",
        switches={"no-gradient-accumulation-fusion": False},
    )
    scaled_upper_triang_masked_softmax_fusion: bool = flag(
        False, "Require the fused causal attention kernel; an error if another flag excludes it.", masked_lm=False
    )
    fused_kernels: str = flag(
        "auto",
        "Implementation of layer norm and Adam; auto uses apex if CUDA and apex are available, and torch otherwise.",
        choices=("auto", "apex", "torch"),
    )
    attention_dropout: float = flag(0.1, "Dropout probability of the attention weights.", within="[0, 1)")
    hidden_dropout: float = flag(0.1, "Dropout probability of the hidden states.", within="[0, 1)")
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", within="(0, inf)")
    apply_query_key_layer_scaling: bool = flag(
        False,
        "Scale attention scores by 1 / layer number, and undo it in fp32, to avoid fp16 overflow.",
        switches={"no-query-key-layer-scaling": False},
    )
    attention_softmax_in_fp32: bool = flag(False, "Compute attention scores and their softmax in fp32.")
    fp16_lm_cross_entropy: bool = flag(
        False, "Compute the cross entropy in the model's half precision instead of fp32."
    )
    use_cpu_initialization: bool = flag(
        False, "Initialize weights on the CPU, so that they are the same on any device."
    )
    shape_order: str = flag(
        "BSH", "Dimension order of hidden states between layers: B batch, S sequence, H hidden.", choices=("BSH", "SBH")
    )
    pre_tokens: int = flag(
        65536,
        "Number of preceding tokens that each token attends to.",
        aliases=("pre-tockens",),
        within="[0, inf)",
        masked_lm=False,
    )
    next_tokens: int = flag(
        65536,
        "Number of following tokens that each token may attend to; has no effect on a causal model.",
        aliases=("next-tockens",),
        within="[0, inf)",
        masked_lm=False,
    )
    fp32_residual_connection: bool = flag(
        False, "Keep the residual connection in fp32 when weights are in half precision."
    )
    architecture: str = derived("GPT-2")
    """Name of its spec among ``megatron.model.spec.ARCHITECTURES``."""
    vocab_size: int = derived(0)
    """Number of tokens of the tokenizer."""
    padded_vocab_size: int = derived(0)
    """Rows of the embedding; rows from ``vocab_size`` on are excluded from the loss."""
    eod_token: int = derived(-1)
    """Token that ends a document."""
    reset_position_ids: bool = derived(False)
    reset_attention_mask: bool = derived(False)
    dtype: str = derived("fp32")
    """Type of weights and activations: fp32, bf16 or fp16."""
    recomputes_attention: bool = derived(False)
    """Whether the backward pass recomputes the attention core alone."""
    seed: int = derived(1234)
    classes: tuple[str, ...] = derived(())
    """Names of the classes of a classifier, in the order of its outputs."""

    @property
    def sequence_dim(self) -> int:
        """Dimension of the sequence in hidden states: [b, s, h], or [s, b, h] with ``--shape-order SBH``."""
        return 0 if self.shape_order == "SBH" else 1

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads


def padded_vocabulary(v: int, t: int, multiple: int = 128) -> int:
    """The vocabulary size ``v`` rounded up to a multiple of ``multiple`` times the tensor-parallel size ``t``."""
    return -(-v // (multiple * t)) * multiple * t
