"""Keys and values of the tokens so far, for generation.

b batch, n heads with keys and values, q new tokens, c columns of the longest sequence, d size of a head
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config import ModelConfig


class KeyValueCache:
    """Keys and values of every layer, for a batch of sequences of several lengths, each of which begins in column 0.

    For every step, ``advance`` reserves the columns after those of each sequence, and each layer fills them with
    ``extend``. Sequences are added by ``join`` and removed by ``select``; the memory is allocated once for
    ``columns`` tokens of each, and again only for more or longer sequences.
    """

    def __init__(
        self, config: ModelConfig, rows: int, columns: int, *, heads: int, dtype: torch.dtype, device: torch.device
    ):
        """For ``rows`` sequences without tokens."""
        shape = (config.num_layers, 2, rows, heads, columns, config.head_size)
        # Zeros, since what is masked is multiplied by 0, and memory that was never written may hold NaN.
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self._pre_tokens = config.pre_tokens
        self._lengths = [0] * rows
        # Views of one step, made for all layers at once: for each keys, then values.
        self._so_far: tuple[Tensor, ...] = ()
        """All columns including the new ones [b, n, c, d]."""
        self._new: tuple[Tensor, ...] = ()
        """The new columns [b, n, q, d], in a step in which they are the same of all sequences."""
        self._vectors: tuple[Tensor, ...] = ()
        """All vectors of the memory [all rows x n x all columns, d], in a step in which new columns differ."""
        self._index: Tensor | None = None
        """Places of the new tokens in ``_vectors`` [b x n x q]; None in a step in which new columns are the same."""
        self.positions = torch.empty(0, 0, device=device)
        """Positions of the new tokens in their sequences [b, q]."""
        self.rotation: tuple[Tensor, Tensor] | None = None
        """Cosines and sines of ``positions``, once a layer has computed them for all."""
        self.mask: Tensor | None = None
        """Added to the scores of the new tokens [b, 1, q, c]: 0, or -inf where a token does not attend to a column."""
        self.is_causal = True
        """Whether new tokens attend to earlier columns only, and no mask says so. False where they attend to all that
        ``mask`` does not hide."""

    def advance(self, counts: Sequence[int]) -> None:
        """Reserve columns for so many new tokens of each sequence, all of them followed by padding up to the most.

        Padding is stored, too, after the tokens, which do not attend to it, and is replaced in the next step.
        """
        q, begins, device = max(counts), self._lengths, self._storage.device
        self._lengths = [begin + count for begin, count in zip(begins, counts, strict=True)]
        begin, end = max(begins), max(begins) + q
        assert end <= self._storage.size(4), "no columns are left"
        is_even, used = min(begins) == begin, self._storage[:, :, : len(begins)].flatten(0, 1)
        self._so_far = used[:, :, :, :end].unbind(0)
        if is_even:
            positions = torch.arange(begin, end, device=device).unsqueeze(0)  # [1, q]
            self._new, self._index = used[:, :, :, begin:end].unbind(0), None
        else:
            positions = torch.tensor(begins, device=device).unsqueeze(1) + torch.arange(q, device=device)  # [b, q]
            self._vectors, self._index = self._storage.flatten(2, 4).flatten(0, 1).unbind(0), self._places(positions)
        self.positions, self.rotation = positions.expand(len(begins), q), None
        sees_all = is_even and (q == 1 or q == end) and self._pre_tokens >= end - 1
        self.mask = None if sees_all else self._mask(positions, end)
        self.is_causal = sees_all and q > 1

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, n, q, d]. Returns those of all columns so far, [b, n, c, d] each."""
        of_keys, of_values = 2 * layer, 2 * layer + 1
        if self._index is None:
            self._new[of_keys].copy_(key)
            self._new[of_values].copy_(value)
        else:
            self._vectors[of_keys].index_copy_(0, self._index, key.reshape(-1, key.size(-1)))
            self._vectors[of_values].index_copy_(0, self._index, value.reshape(-1, key.size(-1)))
        return self._so_far[of_keys], self._so_far[of_values]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order; one may be repeated. Those that stay in their place are not copied."""
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        self._reserve(len(rows), 0)
        self._lengths = [self._lengths[row] for row in rows]
        if moved:
            to, row = (torch.tensor(each, device=self._storage.device) for each in zip(*moved, strict=True))
            used = slice(0, max(self._lengths))
            self._storage[:, :, to, :, used] = self._storage[:, :, row, :, used]

    def clear(self, rows: Sequence[int]) -> None:
        """Make the memory of these sequences 0, as it was at first; they are removed next."""
        self._storage[:, :, list(rows)] = 0

    def join(self, other: "KeyValueCache") -> None:
        """Append the sequences of ``other``."""
        mine, all_rows = len(self._lengths), len(self._lengths) + len(other._lengths)
        self._reserve(all_rows, other._storage.size(4))
        used = slice(0, max(other._lengths))
        self._storage[:, :, mine:all_rows, :, used] = other._storage[:, :, : len(other._lengths), :, used]
        self._lengths += other._lengths

    def _places(self, positions: Tensor) -> Tensor:
        """Where tokens of ``positions`` [b, q] are stored among [all rows x n x all columns]."""
        _, _, _, heads, columns, _ = self._storage.shape
        rows = torch.arange(len(positions) * heads, device=positions.device)  # and heads [b x n]
        return (rows.view(-1, heads, 1) * columns + positions.unsqueeze(1)).flatten()

    def _mask(self, positions: Tensor, end: int) -> Tensor:
        back = positions.unsqueeze(-1) - torch.arange(end, device=positions.device)  # [b, q, c]
        hidden = back < 0
        if self._pre_tokens < end - 1:
            hidden |= back > self._pre_tokens
        zeros = torch.zeros(hidden.shape, dtype=self._storage.dtype, device=positions.device)
        return zeros.masked_fill_(hidden, -torch.inf).unsqueeze(1)

    def _reserve(self, rows: int, columns: int) -> None:
        """Make room for so many rows and columns; for twice as many rows if they are not enough.

        Views of the memory before it are dropped, or it would not be freed.
        """
        layers, two, has_rows, heads, has_columns, d = self._storage.shape
        if rows <= has_rows and columns <= has_columns:
            return
        more_rows = max(rows, 2 * has_rows) if rows > has_rows else has_rows
        storage = self._storage.new_zeros(layers, two, more_rows, heads, max(columns, has_columns), d)
        used = (slice(None), slice(None), slice(0, len(self._lengths)), slice(None), slice(0, max(self._lengths)))
        storage[used] = self._storage[used]
        self._storage = storage
        self._so_far = self._new = self._vectors = ()
