"""Finds the first tensor of an iteration that differs from one process, and the operation that computed it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from megatron.tools.verify.shards import Name, Part, Rank, Recording

_LARGEST_WITH_CHOICES = 1e-3
"""With a larger bound, rounding may change which experts get a token; tensors after this are not compared."""
_AXES = {"tensor": "tensor-parallel", "ring": "context-parallel", "ulysses": "Ulysses"}


@dataclass(frozen=True)
class Finding:
    """Where a layout first differs."""

    tensor: str
    """The first tensor that differs, in the order in which it is computed."""
    operation: str
    """The operation that has computed it from tensors that agree."""
    cause: str = ""
    """The kind of fault that its values show, such as an absent reduction; empty if unknown."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Number of calls of each collective by a rank, in that operation on one micro-batch."""


def locate(reference: Rank, other: Recording, bound: float) -> Finding | None:
    """The first difference above ``bound``, relative to the tensor's largest element; None if there is none.

    In half precision, tensors after a router that chooses different experts are not compared.
    """
    tensors = list(_in_order(reference, other))
    names = {name for name, _ in tensors}
    rerouted = first_rerouted(reference, other) if bound > _LARGEST_WITH_CHOICES else None
    for name, full in tensors[:rerouted]:
        if name not in other.names:
            module = _described(name, reference)
            return Finding(f"output of {module}, on no rank", f"the layers of the stages: {module} is absent")
        parts = other.parts(name, False, reference, full)
        if differing := _differing(parts, bound):
            calls = collectives(other, name.module, is_backward=False)
            tensor = f"{_tensor_title(name, other)} {_ranks_and_micro_batches(differing)}"
            return Finding(tensor, _forward_operation(name, full, other), cause_from_values(parts, other), calls)
        next_call = name._replace(call=name.call + 1)
        if next_call in other.names and next_call not in names:
            module = _described(next_call, other)
            return Finding(f"output of {module}", f"the layers of the stages: {module} runs again")
    for name, full in reversed(tensors if rerouted is None else []):
        parts = other.parts(name, True, reference, full)
        if differing := _differing(parts, bound):
            module, operation = _backward_operation(name, full, reference, other)
            calls = collectives(other, module, is_backward=True)
            tensor = f"gradient of the {_tensor_title(name, other)} {_ranks_and_micro_batches(differing)}"
            return Finding(tensor, operation, cause_from_values(parts, other), calls)
    return None


def collectives(recording: Recording, module: str, *, is_backward: bool) -> Counter[str]:
    """Number of calls of each collective in a pass of ``module``, on the first rank that runs it."""
    by_rank = (rank.collectives.get((module, is_backward)) for rank in recording.ranks)
    return Counter(next((calls for calls in by_rank if calls), ()))


def _in_order(reference: Rank, other: Recording) -> Iterator[tuple[Name, Name]]:
    """Tensors of a layout in the order of one process, each with its name there: a stage's input is an output there."""
    first = min((key.micro_batch for key in reference.tensors), default=0)
    names = [key.name for key in reference.tensors if key.micro_batch == first and not key.is_gradient]
    for layer, layer_names in groupby(names, key=lambda name: name.module.partition(".")[0]):
        for part, source in enumerate(reference.inputs.get(layer, ())):
            received = Name(f"{layer}.input", part=part)
            if received in other.names and received != source:
                yield received, source
        yield from ((name, name) for name in layer_names)


def first_rerouted(reference: Rank, other: Recording) -> int | None:
    """The position in ``_in_order`` of the first router that chooses other experts than on one process."""
    for position, (name, full) in enumerate(_in_order(reference, other)):
        is_choice = name.module.endswith(".router") and name.part > 0
        if is_choice and _differing(other.parts(name, False, reference, full), 0.0):
            return position
    return None


def _differing(parts: Sequence[Part], bound: float) -> list[Part]:
    largest = max((part.expected.abs().max().item() for part in parts if part.expected.numel()), default=0.0)
    return [part for part in parts if not _difference(part.actual, part.expected) <= bound * largest]


def _difference(actual: Tensor, expected: Tensor) -> float:
    largest = (actual - expected).abs().max().item() if actual.numel() else 0.0
    return torch.inf if largest != largest else largest


def _described(name: Name, run: Rank | Recording) -> str:
    kind = run.classes.get(name.module)
    return f"{name}{f' ({kind})' if kind else ''}"


def _tensor_title(name: Name, other: Recording) -> str:
    if name.module in ("loss", "targets") or name.module.endswith(".input"):
        return f"{name.module}{f' {name.part + 1}' if name.part else ''}"
    return f"output of {_described(name, other)}"


def _ranks_and_micro_batches(parts: Sequence[Part]) -> str:
    ranks = sorted({rank for part in parts for rank in part.ranks})
    batches = sorted({part.micro_batch + 1 for part in parts})
    return f"(ranks {', '.join(map(str, ranks))}; micro-batches {', '.join(map(str, batches))})"


def _forward_operation(name: Name, full: Name, other: Recording) -> str:
    if name.module == "targets":
        return "the batch: labels and loss weights"
    if name == full and name.module.endswith(".input"):
        return "the batch: tokens"
    if name != full:
        return f"the transfer of the output of {_described(full, other)} to the next stage"
    if other.has_other_weights(name.module):
        return f"the optimizer step before: replicas have different weights of {_described(name, other)}"
    submodules = [module for module in other.classes if module.startswith(f"{name.module}.")]
    outside = " outside of its modules" if submodules else ""
    return f"the forward pass of {_described(name, other)}{outside}"


def _backward_operation(name: Name, full: Name, reference: Rank, other: Recording) -> tuple[str, str]:
    """The module that reads a tensor and computes its gradient in its backward pass; and that operation."""
    reader = _reader(full, reference)
    layer = reader.partition(".")[0]
    if name == full and Name(f"{layer}.input") in other.names and reference.inputs.get(layer, [None])[0] == full:
        return "", f"the transfer of its gradient from the stage of layer {layer}"
    if reader == "loss":
        return reader, "the backward pass of the loss"
    return reader, f"the backward pass of {_described(Name(reader), other)}"


def _reader(name: Name, reference: Rank) -> str:
    """The innermost module that first reads ``name``; if none does, the next module of the forward pass."""
    readers = reference.consumers.get(name, [])
    innermost = [module for module in readers if not any(reader.startswith(f"{module}.") for reader in readers)]
    if innermost:
        return innermost[0]
    modules = list(dict.fromkeys(key.name.module for key in reference.tensors if not key.is_gradient))
    later = modules[modules.index(name.module) + 1 :]
    return next((module for module in later if not name.module.startswith(f"{module}.")), "loss")


def cause_from_values(parts: Sequence[Part], other: Recording) -> str:
    """The kind of fault, if the tensors that differ are a sum, multiple or swap of the right ones; otherwise empty."""
    places = {rank.number: rank.place._asdict() for rank in other.ranks}
    single = [part for part in parts if len(part.ranks) == 1]
    for axis, ranks in _AXES.items():
        sums = [_sum_over(axis, part, single, places) for part in single]
        if sums and all(_is_sum(total, part.expected) for total, part in zip(sums, single, strict=True)):
            return f"their sum over the {ranks} ranks is right: a reduction is absent"
    actual = torch.cat([part.actual.flatten() for part in parts])
    expected = torch.cat([part.expected.flatten() for part in parts])
    if factor := _factor(actual, expected):
        return f"{factor:.3g} times what they should be"
    if all(any(_equal(part.actual, other.expected) for other in parts if other is not part) for part in parts):
        return "each is what another rank should have"
    return ""


def cause_from_copies(copies: Sequence[Tensor], expected: Tensor) -> str:
    """The kind of fault, if the sum of several ranks' copies of a gradient is right; otherwise empty."""
    if len(copies) > 1 and all(copy.shape == expected.shape for copy in copies):
        if _equal(torch.stack(list(copies)).sum(0), expected):
            return f"the sum of its {len(copies)} copies is right: a reduction is absent"
    return ""


def _sum_over(axis: str, addend: Part, parts: Sequence[Part], places: Mapping[int, dict]) -> Tensor | None:
    """The sum of a tensor over the ranks along ``axis``; None if a rank lacks it or its shapes differ."""

    def off_axis(part: Part) -> tuple:
        return part.micro_batch, {key: value for key, value in places[part.ranks[0]].items() if key != axis}

    addends = [part.actual for part in parts if off_axis(part) == off_axis(addend)]
    size = places[addend.ranks[0]][axis][1]
    return torch.stack(addends).sum(0) if len(addends) == size > 1 and len({x.shape for x in addends}) == 1 else None


def _factor(actual: Tensor, expected: Tensor) -> float | None:
    if not expected.any():
        return None
    factor = (actual @ expected / expected.square().sum()).item()
    return factor if abs(factor - 1) > 1e-2 and _equal(actual, factor * expected) else None


def _is_sum(total: Tensor | None, expected: Tensor) -> bool:
    return total is not None and _equal(total, expected)


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and _difference(actual, expected) <= 1e-2 * expected.abs().max().item()
