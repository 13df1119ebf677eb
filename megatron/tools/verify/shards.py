"""What the ranks of a layout have recorded, beside what it should be: parts of the tensors of one process.

The part that a rank should have follows from the shapes of the full tensor and its own, and from its place.
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
"""Ends of the names of modules, and whether it is about gradients, whose tensors are partial sums. Of
``.dense_4h_to_h`` those of experts."""


class Name(NamedTuple):
    """A tensor that a module computes, of any micro-batch."""

    module: str
    """``2.attention.dense``; ``2.input`` is what layer 2 gets from elsewhere; ``targets`` and ``loss``."""
    call: int = 0
    """Of the module, in a micro-batch."""
    part: int = 0
    """Of a module's output that is a tuple."""

    def __str__(self) -> str:
        return self.module + (f", call {self.call + 1}" if self.call else "")


class Key(NamedTuple):
    """A tensor of a recording."""

    micro_batch: int
    """From 0 on, in the order of the samples of all data-parallel ranks."""
    name: Name
    is_gradient: bool = False


class Place(NamedTuple):
    """Where a rank is in the layout: index and size along each axis that divides tensors."""

    tensor: tuple[int, int]
    ring: tuple[int, int]
    ulysses: tuple[int, int]
    expert: tuple[int, int]
    stage: int
    sequence_parallel: bool


class Cut(NamedTuple):
    """A dimension that an axis divides, and the part of it that a rank has."""

    dim: int
    axis: str
    number: int
    size: int

    def of(self, full: Tensor) -> Tensor:
        """The part of ``full``; a ring has chunks in zigzag order."""
        if self.axis != "ring":
            return full.chunk(self.size, self.dim)[self.number]
        chunks = full.chunk(2 * self.size, self.dim)
        return torch.cat([chunks[one] for one in chunks_of(self.number, self.size)], self.dim)


@dataclass
class Rank:
    """What one rank has recorded, and what it has to do with tensors of one process."""

    number: int
    place: Place
    vocabulary: tuple[int, int]
    """Its size without and with padding."""
    lengths: tuple[int, int]
    """Of the sequences of the model, and of its decoder or 0."""
    experts: int
    senders: list[int]
    """For each rank that sends tokens to experts here: how many micro-batches its own are after those of this rank."""
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    inputs: dict[str, list[Name]] = field(default_factory=dict)
    """Of each layer."""
    consumers: dict[Name, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The modules that read a tensor."""
    collectives: dict[tuple[str, bool], list[str]] = field(default_factory=lambda: defaultdict(list))
    """By the module, and whether it is in its backward pass."""
    classes: dict[str, str] = field(default_factory=dict)
    """Of each module, its name."""
    weights: dict[str, list[float]] = field(default_factory=dict)
    """Norms of the weights of each module."""
    parts: dict[str, int] = field(default_factory=dict)
    """Matrices that are side by side in the weight of a module."""

    def expected(
        self, name: Name, full: Tensor, shape: torch.Size, reference: "Rank"
    ) -> tuple[Tensor, tuple[Cut, ...]] | None:
        """The part of ``full`` that has ``shape`` on this rank; None if the shapes are not those of a part."""
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
    """How axes divide a tensor of shape ``full`` so that a rank has ``shape``.

    The sequence, one of the dimensions of such ``lengths``, is divided over rings, Ulysses and, with sequence
    parallelism, the tensor-parallel ranks; heads or columns over the tensor-parallel ranks, and within Ulysses.
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
            of_sequence = [Cut(dim, axis, *getattr(place, axis)) for axis in axes]
            others = _cuts_of_heads(place, {d: ratio for d, ratio in ratios.items() if d != dim}, axes)
            if others is not None:
                return *(cut for cut in of_sequence if cut.size > 1), *others
    return None


def _cuts_of_heads(place: Place, ratios: dict[int, int], used: Iterable[str]) -> list[Cut] | None:
    if not ratios:
        return []
    if len(ratios) > 1 or "tensor" in used:
        return None
    ((dim, ratio),) = ratios.items()
    (index, size), (of_ulysses, parts) = place.tensor, place.ulysses
    if "ulysses" not in used and ratio == size * parts:
        return [Cut(dim, "tensor", index, size), Cut(dim, "ulysses", of_ulysses, parts)]
    return [Cut(dim, "tensor", index * ratio // size, ratio)] if size % ratio == 0 else None


def _rows_of_experts(rank: Rank, key: Key, reference: Rank) -> Tensor | None:
    """The rows that an expert-parallel rank gets: those of its experts, of the micro-batches of all ranks that send."""
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
    """A tensor of a rank, or of several if it is their sum, and what it should be."""

    ranks: tuple[int, ...]
    micro_batch: int
    found: Tensor
    expected: Tensor


class Recording:
    """What the ranks of a run have recorded of an iteration."""

    def __init__(self, folder: Path):
        files = sorted(folder.glob("rank*.pt"))
        self.ranks: list[Rank] = [torch.load(file, weights_only=False) for file in files]  # this tool's own
        self.names = {name for rank in self.ranks for _, name, _ in rank.tensors}
        self.classes = {module: kind for rank in self.ranks for module, kind in rank.classes.items()}

    def has_other_weights(self, module: str) -> bool:
        """Whether replicas have different weights of ``module``, by their norms."""
        first: dict[tuple, list[float]] = {}
        for rank in self.ranks:
            place, weights = rank.place, rank.weights.get(module, [])
            if weights and first.setdefault((place.tensor, place.expert, place.stage), weights) != weights:
                return True
        return False

    def parts(self, name: Name, is_gradient: bool, reference: Rank, full: Name) -> list[Part]:
        """The tensors ``name`` of all ranks and micro-batches, beside the tensor ``full`` of one process."""
        sums: dict[tuple, list[tuple[Rank, Tensor, Tensor]]] = {}
        for rank in self.ranks:
            for key, tensor in rank.tensors.items():
                if (key.name, key.is_gradient) != (name, is_gradient):
                    continue
                of_one = reference.tensors.get(key._replace(name=full))
                if of_one is not None and ".experts" in name.module and rank.place.expert[1] > 1:
                    of_one = _rows_of_experts(rank, key, reference)
                expected = None if of_one is None else rank.expected(name, of_one, tensor.shape, reference)
                if expected is None:
                    continue
                cuts = expected[1]
                ring, ulysses = rank.place.ring, rank.place.ulysses
                if is_gradient and any(cut.axis in ("ring", "ulysses") for cut in cuts):
                    tensor = tensor / (ring[1] * ulysses[1])  # the mean over these ranks is of their losses
                group: tuple = (key.micro_batch, cuts, rank.number)
                if _is_partial(name, is_gradient):
                    group = (key.micro_batch, cuts, ring, ulysses, rank.place.stage)
                if name.module == "loss" and not is_gradient:
                    group, tensor = (key.micro_batch, rank.place.tensor), tensor / (ring[1] * ulysses[1])
                sums.setdefault(group, []).append((rank, tensor, expected[0]))
        return [
            Part(
                tuple(rank.number for rank, _, _ in some),
                group[0],
                torch.stack([tensor.double() for _, tensor, _ in some]).sum(0),
                some[0][2].double(),
            )
            for group, some in sums.items()
        ]


def _is_partial(name: Name, is_gradient: bool) -> bool:
    ends = (end for end, of_gradients in _PARTIAL_SUMS if of_gradients == is_gradient)
    is_end = any(name.module.endswith(end) for end in ends)
    return is_end and (not name.module.endswith(".dense_4h_to_h") or ".experts." in name.module)
