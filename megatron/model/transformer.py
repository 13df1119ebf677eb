"""Transformer layer with tensor parallelism: attention, MLP and residual connections.

b batch, s sequence, h hidden
"""

from collections.abc import Callable

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention import ParallelSelfAttention
from megatron.model.weights import column_parallel, hidden_norm, row_parallel
from megatron.ops.activation import bias_gelu, dropout_add, mlp_activation, recomputed
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import random_stream

HiddenStates = Tensor | tuple[Tensor, Tensor]
"""State passed between layers and stages: hidden [b, s, h], or [s, b, h] for ``--shape-order SBH``, and segment ids,
int32 [b, s], if attention is limited to segments. With ``--fp32-residual-connection`` hidden is fp32."""


def unpack(hidden_states: HiddenStates) -> tuple[Tensor, Tensor | None]:
    """Split a state into hidden and segment ids (or None)."""
    return hidden_states if isinstance(hidden_states, tuple) else (hidden_states, None)


class ParallelTransformerLayer(nn.Module):
    """Pre-norm transformer layer: hidden [b, s, h] -> hidden [b, s, h]."""

    mlp_class: type[nn.Module] | None = None
    """Class to use instead of ``ParallelMLP``."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = hidden_norm(config, layout)
        self.attention = ParallelSelfAttention(config, layout, layer_number=layer_number, causal=causal)
        self.post_attention_layernorm = hidden_norm(config, layout)
        self.mlp = (self.mlp_class or ParallelMLP)(config, layout, layer_number=layer_number)
        self.add = ResidualConnection(config, layout)
        self.draws_random_numbers = max(config.hidden_dropout, config.attention_dropout) > 0
        self._compiled: Callable[..., Tensor] | None = torch.compile(self.compute) if config.compile else None

    def forward(self, hidden_states: HiddenStates) -> HiddenStates:
        hidden, segment_ids = unpack(hidden_states)
        if self._compiled is None:
            hidden = self.compute(hidden, segment_ids)
        elif not (self.training and self.draws_random_numbers):
            hidden = self._compiled(hidden, segment_ids)
        else:
            # A compiled graph uses one random stream: the per-rank stream of attention. Masks of the shared stream are
            # arguments.
            masks = self.add.shared_masks(hidden)
            with random_stream(per_rank=True):
                hidden = self._compiled(hidden, segment_ids, *masks)
        return hidden if segment_ids is None else (hidden, segment_ids)

    def compute(
        self,
        hidden: Tensor,
        limits: Tensor | None,
        attention_mask: Tensor | None = None,
        mlp_mask: Tensor | None = None,
    ) -> Tensor:
        """The computation of the layer. ``limits`` are segment ids, or in T5 an attention mask.

        ``attention_mask`` and ``mlp_mask`` [b, s, h] are dropout masks for a compiled layer.
        """
        normed = self.input_layernorm(hidden)
        hidden = self.add(hidden, normed, self.attention(normed, limits), attention_mask)
        normed = self.post_attention_layernorm(hidden)
        return self.add(hidden, normed, self.mlp(normed), mlp_mask)


class ResidualConnection(nn.Module):
    """Residual connection, hidden + dropout(output), all [b, s, h].

    ``--apply-residual-connection-post-layernorm`` adds to the norm of hidden instead. The ranks of a tensor group share
    dropout masks, unless each has a shard of the sequence.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.dropout, self.is_sequence_parallel = config.hidden_dropout, layout.sequence_parallel
        self.residual_is_normed = config.apply_residual_connection_post_layernorm
        self.dropout_add = dropout_add(config)

    def forward(self, hidden: Tensor, normed: Tensor, output: Tensor, mask: Tensor | None = None) -> Tensor:
        """Dropout keeps the elements where ``mask`` is True; the mask is drawn here if it is None."""
        residual = normed.to(hidden.dtype) if self.residual_is_normed else hidden
        if not (self.training and self.dropout):
            return self.dropout_add(output, residual, 0.0)
        if mask is not None:
            return residual + output * mask * (1 / (1 - self.dropout))
        with random_stream(per_rank=self.is_sequence_parallel):
            return self.dropout_add(output, residual, self.dropout)

    def shared_masks(self, hidden: Tensor) -> list[Tensor]:
        """Dropout masks [b, s, h] after attention and MLP, equal on the tensor group; [] if each rank draws its own."""
        if self.is_sequence_parallel or not self.dropout:
            return []
        return [torch.empty_like(hidden, dtype=torch.bool).bernoulli_(1 - self.dropout) for _ in range(2)]


class ParallelMLP(nn.Module):
    """MLP, hidden [b, s, h] -> hidden [b, s, h], of hidden size ``ffn_hidden_size`` or ``size``; may be gated.

    With ``--tiled-mlp`` DeepSpeed's TiledMLP runs forward and backward on a tile of tokens at a time.
    """

    def __init__(
        self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int = 0, name: str = "", size: int = 0
    ):
        super().__init__()
        h, inner = config.hidden_size, size or config.ffn_hidden_size
        self.config = config
        name, fused = name or f"layers.{layer_number}.mlp", bias_gelu(config)
        parts = 2 if config.is_gated else 1
        self.dense_h_to_4h = column_parallel(
            config, layout, f"{name}.dense_h_to_4h", h, inner, parts=parts, activation=fused
        )
        self.activation = nn.Identity() if fused else mlp_activation(config)
        self.dense_4h_to_h = row_parallel(config, layout, f"{name}.dense_4h_to_h", inner, h)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.config.tiled_mlp:
            return self._compute(hidden)
        tokens = hidden.flatten(0, 1)  # with two dimensions DeepSpeed splits the same one in forward and backward
        tiles = self.config.mlp_tiles(len(tokens))
        if torch.is_grad_enabled() and not tokens.requires_grad:  # otherwise adapters would get no gradient
            tokens = tokens.detach().requires_grad_()
        return TiledMLP.apply(ParallelMLP._tile, self, tokens, tiles, [*self.parameters()]).view_as(hidden)

    def _compute(self, hidden: Tensor) -> Tensor:
        inner = self.dense_h_to_4h(hidden)
        output = self.activation(inner)
        if not self.config.recompute_mlp_activation:
            return self.dense_4h_to_h(output)
        with recomputed(output, self.activation, inner):
            return self.dense_4h_to_h(output)

    def _tile(self, tokens: Tensor) -> Tensor:
        """Compute one tile of tokens, [tokens, h] -> [tokens, h], as a batch of one sequence."""
        batch_dim = 1 - self.config.sequence_dim
        return self._compute(tokens.unsqueeze(batch_dim)).squeeze(batch_dim)
