"""Partial reads of tensors in ``torch.save`` files: a rank only reads the elements that it needs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.checks import check_numbers, name_of, outline, value_at, wrong
from megatron.checkpoint.files import Record
from megatron.checkpoint.manifest import check_content
from megatron.checkpoint.tensor_files import check_identity, read_file
from megatron.common.errors import CheckpointError
from megatron.model.spec import ParameterSpec

State = dict[str, Any]
"""The state of a parameter by name: its weight, and the optimizer's moments and step count."""
WEIGHT = "fp32"
"""Name of the weight in a state."""


class StoredFile:
    """A ``torch.save`` file, mapped into memory when its content is first needed.

    It is then compared with ``record`` and checked to be from ``iteration``, if these are given. Raises the same errors
    as ``read_file`` and ``check_identity``.
    """

    def __init__(self, path: Path, record: Record | None = None, iteration: int | None = None) -> None:
        self.path, self._record, self._iteration = path, record, iteration

    @cached_property
    def content(self) -> Any:
        """The saved content, with mapped tensors."""
        if self._record is not None:
            check_content(self.path, self._record)
        if not isinstance(content := read_file(self.path), Mapping):
            raise wrong(self.path, "it", outline(content), "a dict")
        if self._iteration is not None:
            check_identity(self.path, content, self._iteration)
        return content

    def find(self, keys: Sequence[Any]) -> Any:
        """The value at a path of keys. Raises CheckpointError if it does not exist."""
        return value_at(self.path, self.content, *keys)

    def entry(self, *keys: Any) -> Any:
        """The value at a path of keys, with a tensor as ``Stored`` if it has dimensions."""
        value = self.find(keys)
        return Stored([Piece(self, keys, 0, value.numel())], value.shape) if is_flat(value) else value


class Piece(NamedTuple):
    """Elements ``begin`` to ``end`` of the flattened tensor in ``file`` at the path ``keys``."""

    file: StoredFile
    keys: Sequence[Any]
    begin: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.file.find(self.keys).dtype


class Stored:
    """A tensor that is stored in pieces in one or several files."""

    def __init__(self, pieces: Sequence[Piece], shape: Sequence[int]) -> None:
        self.pieces, self.shape = pieces, tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.pieces[0].dtype

    @property
    def path(self) -> Path:
        """The first of its files."""
        return self.pieces[0].file.path

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def flat(self, begin: int, end: int) -> "Stored":
        """Elements ``begin`` to ``end``, flattened."""
        cut, at = [], 0
        for piece in self.pieces:
            length = piece.end - piece.begin
            first, last = max(begin - at, 0), min(end - at, length)
            if first < last:
                cut.append(piece._replace(begin=piece.begin + first, end=piece.begin + last))
            at += length
        return Stored(cut, (end - begin,))

    def columns(self, width: int, rows: range, begin: int, end: int, used_as: torch.dtype = torch.float32) -> Tensor:
        """Columns ``begin`` to ``end`` of some rows of ``width`` elements, [rows, columns], read by ``read_all``."""
        if (begin, end) == (0, width):
            selected = self.flat(rows.start * width, rows.stop * width)
        else:
            selected = joined([self.flat(row * width + begin, row * width + end) for row in rows])
        return selected.read_all(used_as).view(len(rows), end - begin)

    def read_all(self, used_as: torch.dtype = torch.float32) -> Tensor:
        """Read the tensor into memory. Raises ValueError for inconsistent pieces, and CheckpointError unless its
        numbers are possible, and finite when they are converted to ``used_as``.
        """
        parts = [file.find(keys).detach().flatten()[begin:end] for file, keys, begin, end in self.pieces]
        if {part.dtype for part in parts} != {self.dtype} or sum(map(len, parts)) != self.numel():
            raise ValueError(f"{self.path}: its pieces are not of one type, or not of {self.numel():,} elements")
        whole = torch.cat(parts).view(self.shape)
        try:
            check_numbers(self.path, name_of(self.pieces[0].keys), whole, used_as)
        except CheckpointError:
            for piece, part in zip(self.pieces, parts, strict=True):  # which of them it is
                check_numbers(piece.file.path, name_of(piece.keys), part, used_as)
            raise
        return whole


def joined(parts: Sequence[Stored]) -> Stored:
    """The concatenation of tensors along their first dimension."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Stored([piece for part in parts for piece in part.pieces], shape)


class Shard:
    """A tensor-parallel rank's shard of a tensor that is stored in the shards of another layout.

    Args:
        parts: returns the stored shard of a tensor-parallel rank of the saved layout.
        count: tensor-parallel size of the saved layout.
        spec: the parameter.
        stored: shape of each part.
        shape: shape of the shard; it may have more rows of the vocabulary, which are padding and read as zeros.
        rank: tensor-parallel rank of the shard.
        first_expert: first expert of the rank.
    """

    def __init__(
        self,
        parts: Callable[[int], Stored],
        count: int,
        spec: ParameterSpec,
        stored: Sequence[int],
        shape: Sequence[int],
        rank: int = 0,
        first_expert: int = 0,
    ) -> None:
        self.shape, self._parts = tuple(shape), parts
        # View the tensor as a matrix whose columns are sharded; it has a single row if the first dimension is sharded.
        dim, is_divided = spec.shard_dim or 0, spec.shard_dim is not None
        self._count, inner = count if is_divided else 1, prod(spec.shape[dim + 1 :])
        self._width, self._part_width, self._end = (sizes[dim] * inner for sizes in (shape, stored, spec.shape))
        self._column = rank * self._width if is_divided else first_expert * inner
        self._row = first_expert * prod(spec.shape[1:dim]) if dim else 0

    def _needed(self, first: int, last: int) -> range:
        """The saved ranks with columns ``first`` to ``last``."""
        return range(first // self._part_width, min(-(-min(last, self._end) // self._part_width), self._count))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self._parts(0).dtype

    @property
    def path(self) -> Path:
        """The first of the files of the tensor."""
        return self._parts(0).path

    def read_all(self) -> Tensor:
        """Read the full shard."""
        return self.read(0, prod(self.shape)).view(self.shape)

    def read(self, begin: int, end: int, used_as: torch.dtype = torch.float32) -> Tensor:
        """Read elements ``begin`` to ``end`` of the flattened shard, as ``Stored.read_all`` does."""
        if begin == end:  # ZeRO 3 divides a small parameter among more ranks than it has elements
            return torch.empty(0, dtype=self.dtype)
        rows = range(begin // self._width, -(-end // self._width))
        # Of a single row only the requested elements are read.
        skipped = begin - rows.start * self._width if len(rows) == 1 else 0
        width = end - begin if len(rows) == 1 else self._width
        first = self._column + skipped
        matrix = torch.zeros(len(rows), width, dtype=self.dtype)
        for number in self._needed(first, first + width):
            at = number * self._part_width
            low, high = max(first, at), min(first + width, at + self._part_width, self._end)
            if low >= high:  # no element is asked for
                continue
            stored_rows = range(rows.start + self._row, rows.stop + self._row)
            stored = self._parts(number)
            part = stored.columns(self._part_width, stored_rows, low - at, high - at, used_as)
            if part.dtype != matrix.dtype:  # it would be rounded
                piece = next(piece for piece in stored.pieces if piece.dtype == part.dtype)
                raise wrong(
                    piece.file.path, name_of(piece.keys), f"of {part.dtype}", f"of {self.dtype} as in {self.path.name}"
                )
            matrix[:, low - first : high - first] = part
        return matrix.flatten()[begin - rows.start * self._width - skipped :][: end - begin]


def is_flat(value: Any) -> bool:
    """Whether ``value`` is a tensor with the weight's elements, not a number."""
    return isinstance(value, Stored | Shard) or (isinstance(value, Tensor) and value.dim() > 0)


def in_memory(state: State) -> State:
    """``state`` with its tensors read into memory."""
    return {key: value.read_all() if is_flat(value) else value for key, value in state.items()}
