"""What a model is made of."""

from dataclasses import dataclass

from megatron.config.fields import derived, flag


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network size and regularization: what the model is made of."""

    num_layers: int = flag(0, "Number of transformer layers.", within="[1, inf)", required=True)
    hidden_size: int = flag(0, "Size of the hidden states.", within="[1, inf)", required=True)
    num_attention_heads: int = flag(0, "Number of attention heads.", within="[1, inf)", required=True)
    ffn_hidden_size: int = flag(0, "Size inside the MLP (default: 4 x hidden size).", within="[1, inf)")
    max_position_embeddings: int = flag(
        0, "Number of learned positions (default: the sequence length).", within="[1, inf)"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", within="[1, inf)"
    )
    layernorm_epsilon: float = flag(1e-5, "Epsilon of the layer norms.", within="(0, inf)")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "Take the residual from behind the layer norm instead of before it."
    )
    openai_gelu: bool = flag(False, "Use GELU's tanh approximation, as OpenAI's GPT-2 does.")
    bias_gelu_fusion: bool = flag(False, "Compile bias and GELU of the MLP into one kernel (torch.compile).")
    bias_dropout_fusion: bool = flag(False, "Compile bias, dropout and residual into one kernel (torch.compile).")
    compile: bool = flag(False, "Compile each transformer layer (torch.compile); up to a minute at the start.")
    gradient_accumulation_fusion: bool = flag(
        False, "Add up the gradients of micro-batches inside the matrix product that computes them."
    )
    scaled_upper_triang_masked_softmax_fusion: bool = flag(
        False, "Insist on the fused causal attention kernel: an error if another flag rules it out.", masked_lm=False
    )
    fused_kernels: str = flag(
        "auto",
        "Layer norm and Adam from apex, from torch, or from apex where CUDA and apex are found.",
        choices=("auto", "apex", "torch"),
    )
    attention_dropout: float = flag(0.1, "Dropout probability of the attention weights.", within="[0, 1)")
    hidden_dropout: float = flag(0.1, "Dropout probability of the hidden states.", within="[0, 1)")
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", within="(0, inf)")
    apply_query_key_layer_scaling: bool = flag(
        False, "Divide attention scores by the layer number and multiply them back in fp32, against fp16 overflow."
    )
    attention_softmax_in_fp32: bool = flag(False, "Compute attention scores and their softmax in fp32.")
    fp16_lm_cross_entropy: bool = flag(False, "Compute the loss in the model's half precision instead of fp32.")
    use_cpu_initialization: bool = flag(
        False, "Draw initial weights on the CPU, so that they are the same on any device."
    )
    shape_order: str = flag(
        "BSH",
        "Layout of hidden states between layers: batch, sequence, hidden, or sequence first.",
        choices=("BSH", "SBH"),
    )
    pre_tokens: int = flag(65536, "Tokens before itself that each token sees.", within="[0, inf)", masked_lm=False)
    next_tokens: int = flag(
        65536,
        "Tokens behind itself that each token may see, within causality: a decoder sees none, whatever is said.",
        within="[0, inf)",
        masked_lm=False,
    )
    fp32_residual_connection: bool = flag(
        False, "Keep the residual stream in fp32 where weights are in half precision."
    )
    architecture: str = derived("GPT-2")
    """Name of its spec among ``megatron.model.spec.ARCHITECTURES``."""
    vocab_size: int = derived(0)
    """Tokens the tokenizer knows."""
    padded_vocab_size: int = derived(0)
    """Rows of the embedding; those from ``vocab_size`` on take no part in the loss."""
    eod_token: int = derived(-1)
    """Token that ends a document."""
    reset_position_ids: bool = derived(False)
    reset_attention_mask: bool = derived(False)
    dtype: str = derived("fp32")
    """Type of weights and activations: fp32, bf16 or fp16."""
    recomputes_attention: bool = derived(False)
    """Whether the backward pass recomputes the attention core alone."""
    seed: int = derived(1234)

    @property
    def sequence_dim(self) -> int:
        """Dimension of the sequence in hidden states: [b, s, h], or [s, b, h] with ``--shape-order SBH``."""
        return 0 if self.shape_order == "SBH" else 1

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads


def padded_vocabulary(v: int, t: int, multiple: int = 128) -> int:
    """The vocabulary, filled up so that ``t`` ranks hold equal parts of a convenient size."""
    return -(-v // (multiple * t)) * multiple * t
