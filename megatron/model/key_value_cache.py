"""Keys and values of the tokens so far, for generation.

b batch, n heads with keys and values, d size of a head
"""

import torch
from torch import Tensor

from megatron.config import ModelConfig


class KeyValueCache:
    """Keys and values of every layer, for a batch of sequences that end in the same column and may begin later.

    ``begins`` [b] is the column in which each sequence begins; the columns before it are not attended to. For every
    step, ``advance`` reserves new columns, and each layer fills them with ``extend``. In its shapes q are the new
    columns and c the columns so far.
    """

    def __init__(
        self, config: ModelConfig, begins: Tensor, columns: int, *, heads: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (config.num_layers, 2, begins.numel(), heads, columns, config.head_size)
        self._kept = torch.empty(shape, dtype=dtype, device=device)
        self._begins = begins.to(device)
        self._pre_tokens = config.pre_tokens
        self._length = 0
        self.positions = torch.empty(0, 0, device=device)
        """Positions of the new columns in their sequences [b, q]."""
        self.visible = torch.empty(0, 0, 0, 0, device=device)
        """True where a new column attends to a column [b, 1, q, c]."""

    def advance(self, count: int) -> None:
        """Reserve ``count`` new columns."""
        rows = torch.arange(self._length, self._length + count, device=self._begins.device)
        columns = torch.arange(self._length + count, device=self._begins.device)
        self._length += count
        self.positions = (rows - self._begins.unsqueeze(1)).clamp(min=0)
        back = rows.unsqueeze(1) - columns  # [q, c]
        in_window = (back >= 0) & (back <= self._pre_tokens)
        has_begun = columns >= self._begins.unsqueeze(1)  # [b, c]
        # A column before the sequence attends to itself: without any column, the softmax would be NaN, which spreads.
        self.visible = (in_window & has_begun.unsqueeze(1) | (back == 0)).unsqueeze(1)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns so far, [b, n, c, d] each, the new ones [b, n, q, d] last."""
        kept, begin = self._kept[layer], self._length - key.size(2)
        kept[0, :, :, begin : self._length] = key
        kept[1, :, :, begin : self._length] = value
        return kept[0, :, :, : self._length], kept[1, :, :, : self._length]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be repeated."""
        self._kept = self._kept[:, :, rows.to(self._kept.device)]
        self._begins = self._begins[rows.to(self._begins.device)]
