"""The first tensor of an iteration that differs from one process, and the operation before it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from megatron.tools.verify.shards import Name, Part, Rank, Recording

_LARGEST_WITH_CHOICES = 1e-3
"""With a larger bound rounding may decide which experts get a token, and what follows is not compared."""
_AXES = {"tensor": "tensor-parallel", "ring": "context-parallel", "ulysses": "Ulysses"}


@dataclass(frozen=True)
class Finding:
    """Where a layout first differs."""

    tensor: str
    """The first tensor that differs, in the order in which it is computed."""
    operation: str
    """What has computed it from tensors that agree."""
    cause: str = ""
    """What its values say about the operation."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """How often a rank has called each, in that operation on one micro-batch."""


def locate(reference: Rank, other: Recording, bound: float) -> Finding | None:
    """The first difference beyond ``bound``, relative to the tensor's largest element; None if there is none.

    In half precision, nothing after a router that chooses other experts is compared.
    """
    tensors = list(_in_order(reference, other))
    names = {name for name, _ in tensors}
    rerouted = first_rerouted(reference, other) if bound > _LARGEST_WITH_CHOICES else None
    for name, full in tensors[:rerouted]:
        if name not in other.names:
            what = _described(name, reference)
            return Finding(f"output of {what}, of no rank", f"the layers of the stages: {what} is absent")
        parts = other.parts(name, False, reference, full)
        if differing := _differing(parts, bound):
            calls = collectives(other, name.module, is_backward=False)
            what = f"{_what(name, other)} {_where(differing)}"
            return Finding(what, _forward_operation(name, full, other), what_values_say(parts, other), calls)
        again = name._replace(call=name.call + 1)
        if again in other.names and again not in names:
            what = _described(again, other)
            return Finding(f"output of {what}", f"the layers of the stages: {what} runs again")
    for name, full in reversed(tensors if rerouted is None else []):
        parts = other.parts(name, True, reference, full)
        if differing := _differing(parts, bound):
            module, operation = _backward_operation(name, full, reference, other)
            calls = collectives(other, module, is_backward=True)
            what = f"gradient of the {_what(name, other)} {_where(differing)}"
            return Finding(what, operation, what_values_say(parts, other), calls)
    return None


def collectives(recording: Recording, module: str, *, is_backward: bool) -> Counter[str]:
    """How often the first rank that runs a pass of ``module`` calls each collective in it."""
    called = (rank.collectives.get((module, is_backward)) for rank in recording.ranks)
    return Counter(next((calls for calls in called if calls), ()))


def _in_order(reference: Rank, other: Recording) -> Iterator[tuple[Name, Name]]:
    """Tensors in the order of one process, and the name that each has there: the input of a stage is an output."""
    first = min((key.micro_batch for key in reference.tensors), default=0)
    names = [key.name for key in reference.tensors if key.micro_batch == first and not key.is_gradient]
    for layer, some in groupby(names, key=lambda name: name.module.partition(".")[0]):
        for part, source in enumerate(reference.inputs.get(layer, ())):
            received = Name(f"{layer}.input", part=part)
            if received in other.names and received != source:
                yield received, source
        yield from ((name, name) for name in some)


def first_rerouted(reference: Rank, other: Recording) -> int | None:
    """The position of the first router that chooses other experts than on one process."""
    for position, (name, full) in enumerate(_in_order(reference, other)):
        is_choice = name.module.endswith(".router") and name.part > 0
        if is_choice and _differing(other.parts(name, False, reference, full), 0.0):
            return position
    return None


def _differing(parts: Sequence[Part], bound: float) -> list[Part]:
    largest = max((part.expected.abs().max().item() for part in parts if part.expected.numel()), default=0.0)
    return [part for part in parts if not _difference(part.found, part.expected) <= bound * largest]


def _difference(found: Tensor, expected: Tensor) -> float:
    largest = (found - expected).abs().max().item() if found.numel() else 0.0
    return torch.inf if largest != largest else largest


def _described(name: Name, run: Rank | Recording) -> str:
    kind = run.classes.get(name.module)
    return f"{name}{f' ({kind})' if kind else ''}"


def _what(name: Name, other: Recording) -> str:
    if name.module in ("loss", "targets") or name.module.endswith(".input"):
        return f"{name.module}{f' {name.part + 1}' if name.part else ''}"
    return f"output of {_described(name, other)}"


def _where(parts: Sequence[Part]) -> str:
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
    inner = [one for one in other.classes if one.startswith(f"{name.module}.")]
    apart = " outside of its modules" if inner else ""
    return f"the forward pass of {_described(name, other)}{apart}"


def _backward_operation(name: Name, full: Name, reference: Rank, other: Recording) -> tuple[str, str]:
    """The module that reads a tensor, whose backward pass computes its gradient; and the operation."""
    reader = _reader(full, reference)
    layer = reader.partition(".")[0]
    if name == full and Name(f"{layer}.input") in other.names and reference.inputs.get(layer, [None])[0] == full:
        return "", f"the transfer of its gradient from the stage of layer {layer}"
    if reader == "loss":
        return reader, "the backward pass of the loss"
    return reader, f"the backward pass of {_described(Name(reader), other)}"


def _reader(name: Name, reference: Rank) -> str:
    """The first module that reads ``name``, an inner one; otherwise, the next in the order of the forward pass."""
    readers = reference.consumers.get(name, [])
    inner = [one for one in readers if not any(other.startswith(f"{one}.") for other in readers)]
    if inner:
        return inner[0]
    modules = list(dict.fromkeys(key.name.module for key in reference.tensors if not key.is_gradient))
    later = modules[modules.index(name.module) + 1 :]
    return next((one for one in later if not name.module.startswith(f"{one}.")), "loss")


def what_values_say(parts: Sequence[Part], other: Recording) -> str:
    """What tensors that differ have to do with what they should be; empty if it is nothing simple."""
    places = {rank.number: rank.place._asdict() for rank in other.ranks}
    single = [part for part in parts if len(part.ranks) == 1]
    for axis, ranks in _AXES.items():
        sums = [_sum_over(axis, part, single, places) for part in single]
        if sums and all(_is(found, part.expected) for found, part in zip(sums, single, strict=True)):
            return f"their sum over the {ranks} ranks is right: a reduction is absent"
    found, expected = (torch.cat([getattr(part, name).flatten() for part in parts]) for name in ("found", "expected"))
    if factor := _factor(found, expected):
        return f"{factor:.3g} times what they should be"
    if all(any(_equal(one.found, two.expected) for two in parts if two is not one) for one in parts):
        return "each is what another rank should have"
    return ""


def what_copies_say(copies: Sequence[Tensor], expected: Tensor) -> str:
    """The same of the gradient of a parameter, of which several ranks have copies."""
    if len(copies) > 1 and all(copy.shape == expected.shape for copy in copies):
        if _equal(torch.stack(list(copies)).sum(0), expected):
            return f"the sum of its {len(copies)} copies is right: a reduction is absent"
    return ""


def _sum_over(axis: str, one: Part, parts: Sequence[Part], places: Mapping[int, dict]) -> Tensor | None:
    """The sum of a tensor and those of the other ranks along ``axis``; None if they do not have it."""

    def others(part: Part) -> dict:
        return {key: value for key, value in places[part.ranks[0]].items() if key != axis}

    some = [part.found for part in parts if part.micro_batch == one.micro_batch and others(part) == others(one)]
    size = places[one.ranks[0]][axis][1]
    return torch.stack(some).sum(0) if len(some) == size > 1 and len({x.shape for x in some}) == 1 else None


def _factor(found: Tensor, expected: Tensor) -> float | None:
    if not expected.any():
        return None
    factor = (found @ expected / expected.square().sum()).item()
    return factor if abs(factor - 1) > 1e-2 and _equal(found, factor * expected) else None


def _is(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and _equal(found, expected)


def _equal(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and _difference(found, expected) <= 1e-2 * expected.abs().max().item()
