"""Compares the recordings of a layout's ranks with the shards that they should have of the tensors of one process.

The shard that a rank should have follows from the shapes of the full tensor and of the shard, and from its coordinates.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.parallel.sequence import chunks_of

_PARTIAL_SUMS = {
    # A mixture of experts is one tensor-parallel region: partial sums leave it forward, and gradients enter it.
    (".experts", False), (".dense_4h_to_h", False), (".router", True),
    # Several ranks may have copies of a head of keys, each with the gradient of its own queries.
    (".k_layernorm", True), (".rotary", True),
}  # fmt: skip
"""Suffixes of the names of modules whose outputs (False) or gradients (True) are partial sums on each rank. For
``.dense_4h_to_h``, only within experts."""


class Name(NamedTuple):
    """Name of a tensor that a module computes, in any micro-batch."""

    module: str
    """``2.attention.dense``, ``2.input`` (an input of layer 2 from a stage or the batch), ``targets`` or ``loss``."""
    call: int = 0
    """Number of the module's call in a micro-batch."""
    part: int = 0
    """Index in the module's output, if it is a tuple."""

    def __str__(self) -> str:
        return self.module + (f", call {self.call + 1}" if self.call else "")


class Key(NamedTuple):
    """A tensor of a recording."""

    micro_batch: int
    """Number from 0 on, in the order of the samples of all data-parallel ranks."""
    name: Name
    is_gradient: bool = False


class Place(NamedTuple):
    """Coordinates of a rank in the layout: its index and the size along each axis that shards tensors."""

    tensor: tuple[int, int]
    ring: tuple[int, int]
    ulysses: tuple[int, int]
    expert: tuple[int, int]
    stage: int
    sequence_parallel: bool


class Cut(NamedTuple):
    """A dimension that an axis shards, and the index of a rank's shard."""

    dim: int
    axis: str
    number: int
    size: int

    def of(self, full: Tensor) -> Tensor:
        """The shard of ``full``; along the ring, two chunks in zigzag order."""
        if self.axis != "ring":
            return full.chunk(self.size, self.dim)[self.number]
        chunks = full.chunk(2 * self.size, self.dim)
        return torch.cat([chunks[index] for index in chunks_of(self.number, self.size)], self.dim)


@dataclass
class Rank:
    """The recording of one rank."""

    number: int
    place: Place
    vocabulary: tuple[int, int]
    """Size without and with padding."""
    lengths: tuple[int, int]
    """Sequence length of the model, and of its decoder (0 without one)."""
    experts: int
    senders: list[int]
    """Offset of the number of a micro-batch from this rank's, for each rank that sends tokens to its experts."""
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    inputs: dict[str, list[Name]] = field(default_factory=dict)
    """Names of the inputs of each layer."""
    consumers: dict[Name, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Modules that read each tensor."""
    collectives: dict[tuple[str, bool], list[str]] = field(default_factory=lambda: defaultdict(list))
    """Collectives called in each (module, whether in its backward pass)."""
    classes: dict[str, str] = field(default_factory=dict)
    """Name of the class of each module."""
    weights: dict[str, list[float]] = field(default_factory=dict)
    """Norms of the weights of each module."""
    parts: dict[str, int] = field(default_factory=dict)
    """Number of matrices concatenated in the weight of a module."""

    def expected(
        self, name: Name, full: Tensor, shape: torch.Size, reference: "Rank"
    ) -> tuple[Tensor, tuple[Cut, ...]] | None:
        """The shard of ``full`` that has ``shape`` on this rank; None if no shard has this shape."""
        size, padded = self.vocabulary
        if shape and (full.size(-1), shape[-1] * self.place.tensor[1]) == (reference.vocabulary[1], padded):
            full = F.pad(full[..., :size], (0, padded - size))
        parts = self.parts.get(name.module, 1)
        if parts > 1:
            full, shape = full.unflatten(-1, (parts, -1)), torch.Size((*shape[:-1], parts, shape[-1] // parts))
        cuts = None if full.dim() != len(shape) else cuts_of(self.place, full.shape, shape, self.lengths)
        if cuts is None:
            return None
        for cut in cuts:
            full = cut.of(full)
        return (full.flatten(-2) if parts > 1 else full), cuts


def cuts_of(place: Place, full: Sequence[int], shape: Sequence[int], lengths: Sequence[int]) -> tuple[Cut, ...] | None:
    """The axes that shard a tensor of shape ``full`` so that a rank has ``shape``; None if they cannot.

    The sequence, a dimension with one of ``lengths``, is sharded over rings, Ulysses and, with sequence parallelism,
    tensor-parallel ranks; heads or columns over tensor-parallel ranks and, in Ulysses attention, its ranks.
    """
    if any(part == 0 or size % part for size, part in zip(full, shape, strict=True)):
        return None
    ratios = {dim: size // part for dim, (size, part) in enumerate(zip(full, shape, strict=True)) if size != part}
    for dim in (*sorted(ratios, key=lambda dim: full[dim] not in lengths), -1):
        for axes in (("ring", "ulysses"), ("ring", "ulysses", "tensor"), ("ring",), ()):
            if prod(getattr(place, axis)[1] for axis in axes) != ratios.get(dim, 1):
                continue
            if "tensor" in axes and not place.sequence_parallel:
                continue
            sequence_cuts = [Cut(dim, axis, *getattr(place, axis)) for axis in axes]
            head_cuts = _cuts_of_heads(place, {d: ratio for d, ratio in ratios.items() if d != dim}, axes)
            if head_cuts is not None:
                return *(cut for cut in sequence_cuts if cut.size > 1), *head_cuts
    return None


def _cuts_of_heads(place: Place, ratios: dict[int, int], used: Iterable[str]) -> list[Cut] | None:
    if not ratios:
        return []
    if len(ratios) > 1 or "tensor" in used:
        return None
    ((dim, ratio),) = ratios.items()
    index, size = place.tensor
    if "ulysses" not in used and ratio == size * place.ulysses[1]:
        return [Cut(dim, "tensor", index, size), Cut(dim, "ulysses", *place.ulysses)]
    return [Cut(dim, "tensor", index * ratio // size, ratio)] if size % ratio == 0 else None


def _rows_of_experts(rank: Rank, key: Key, reference: Rank) -> Tensor | None:
    """The rows that an expert-parallel rank receives: the tokens of its experts, from all ranks of its group."""
    index, size = rank.place.expert
    router = Name(f"{key.name.module.partition('.experts')[0]}.router", part=1)
    by_sender = []
    for offset in rank.senders:
        sent = key._replace(micro_batch=key.micro_batch + offset)
        rows, chosen = reference.tensors.get(sent), reference.tensors.get(Key(sent.micro_batch, router))
        counts = [] if chosen is None else chosen.flatten().bincount(minlength=rank.experts)[: rank.experts].tolist()
        if rows is None or sum(counts) != len(rows):
            return None
        by_sender.append(rows.split(counts))
    count = rank.experts // size
    return torch.cat([rows[n] for n in range(index * count, (index + 1) * count) for rows in by_sender])


class Part(NamedTuple):
    """A tensor of a rank, or the sum of several ranks' partial sums, and its expected value."""

    ranks: tuple[int, ...]
    micro_batch: int
    actual: Tensor
    expected: Tensor


class Recording:
    """The recordings of all ranks of a run in an iteration."""

    def __init__(self, folder: Path):
        files = sorted(folder.glob("rank*.pt"))
        self.ranks: list[Rank] = [torch.load(file, weights_only=False) for file in files]  # this tool's own
        self.names = {name for rank in self.ranks for _, name, _ in rank.tensors}
        self.classes = {module: kind for rank in self.ranks for module, kind in rank.classes.items()}

    def has_other_weights(self, module: str) -> bool:
        """Whether replicas have different weights of ``module``, according to their norms."""
        first: dict[tuple, list[float]] = {}
        for rank in self.ranks:
            place, weights = rank.place, rank.weights.get(module, [])
            if weights and first.setdefault((place.tensor, place.expert, place.stage), weights) != weights:
                return True
        return False

    def parts(self, name: Name, is_gradient: bool, reference: Rank, full: Name) -> list[Part]:
        """The tensors ``name`` of all ranks and micro-batches, with the shards expected from one process's ``full``."""
        sums: dict[tuple, list[tuple[Rank, Tensor, Tensor]]] = {}
        for rank in self.ranks:
            for key, tensor in rank.tensors.items():
                if (key.name, key.is_gradient) != (name, is_gradient):
                    continue
                full_tensor = reference.tensors.get(key._replace(name=full))
                if full_tensor is not None and ".experts" in name.module and rank.place.expert[1] > 1:
                    full_tensor = _rows_of_experts(rank, key, reference)
                expected = None if full_tensor is None else rank.expected(name, full_tensor, tensor.shape, reference)
                if expected is None:
                    continue
                cuts = expected[1]
                ring, ulysses = rank.place.ring, rank.place.ulysses
                if is_gradient and any(cut.axis in ("ring", "ulysses") for cut in cuts):
                    tensor = tensor / (ring[1] * ulysses[1])  # the loss is the mean over these ranks' losses
                group: tuple = (key.micro_batch, cuts, rank.number)
                if _is_partial(name, is_gradient):
                    group = (key.micro_batch, cuts, ring, ulysses, rank.place.stage)
                if name.module == "loss" and not is_gradient:
                    group, tensor = (key.micro_batch, rank.place.tensor), tensor / (ring[1] * ulysses[1])
                sums.setdefault(group, []).append((rank, tensor, expected[0]))
        return [
            Part(
                tuple(rank.number for rank, _, _ in addends),
                group[0],
                torch.stack([tensor.double() for _, tensor, _ in addends]).sum(0),
                addends[0][2].double(),
            )
            for group, addends in sums.items()
        ]


def _is_partial(name: Name, is_gradient: bool) -> bool:
    suffixes = tuple(suffix for suffix, for_gradients in _PARTIAL_SUMS if for_gradients == is_gradient)
    is_listed = name.module.endswith(suffixes)
    return is_listed and (not name.module.endswith(".dense_4h_to_h") or ".experts." in name.module)
