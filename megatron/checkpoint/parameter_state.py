"""Reads weights and optimizer state by parameter from the files of a checkpoint, for any layout and ZeRO stage.

The *state* of a parameter: ``fp32``, the weight itself, and the optimizer's moments under their names (``exp_avg``,
``exp_avg_sq``), all with the same shape, and ``step``, a number.

DeepSpeed's files contain states in *blocks*: a flat fp32 tensor that the optimizer updates, and flat moments of the
same length. Without ZeRO a block is a parameter or a parameter group. At ZeRO 1 and 2 it is a parameter group,
partitioned over the data-parallel ranks. At ZeRO 3 it is the concatenation of a rank's parts of all parameters of a
group, padded at the end.

With expert parallelism, the parameter group of experts is partitioned over the ranks that hold the same experts.
Otherwise files of their own (``expert_file``) have the experts of all ranks of an expert group but the first.

Weights that are frozen (LoRA) have no optimizer state. They are stored with the other weights in DeepSpeed's files; at
ZeRO 3 separately, in parts.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checks import check_outline, form_errors, name_of, outline, wrong
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.saved_files import PADDINGS, SavedFiles, Shapes, numbered_state
from megatron.checkpoint.stored import WEIGHT, Piece, Shard, State, Stored, StoredFile, is_flat, joined
from megatron.common.errors import CheckpointError
from megatron.model.architectures import architecture_of
from megatron.model.spec import parameter_prefix

_OF_MATRICES = ("row_var", "col_var")
"""Adafactor's sums over the rows and columns of a matrix, which cannot be resharded."""


class SavedStates:
    """The states of the parameters in the files of ``saved``, read on demand.

    Raises the same errors as ``SavedFiles``, and CheckpointError for a tensor of another shape than its parameter.
    """

    def __init__(self, saved: SavedRun, *, verified: bool = False) -> None:
        self.saved, self.layout = saved, saved.layout
        self.config = saved.full_model_config()
        self.specs = architecture_of(self.config).named_parameters(self.config)
        self.files = SavedFiles(saved, verified=verified)
        self.state = cache(self._state)
        self._module = cache(self._checked_module)
        self._others = cache(self._checked_others)
        self._spans = cache(self._spans_of)
        self._check_order = cache(self._compare_order)

    def _state(self, name: str, tensor_rank: int) -> State:
        """The state of a parameter on a tensor-parallel rank; only the weight if it is frozen."""
        for stage in self.files.stages() if self.saved.has_optimizer else ():
            if any(name in group for group in self.files.groups(stage)):
                return self.trained(name, stage, tensor_rank)
        return {WEIGHT: self.weight(name, tensor_rank)}

    def shard(self, name: str, shape: Sequence[int], rank: int = 0, size: int = 1, first_expert: int = 0) -> State:
        """The state resharded to tensor-parallel rank ``rank`` of ``size``, with ``shape``: ``Shard`` and numbers."""
        spec, stored, count = self.specs[name], self._stored_shape(name), self.layout.model_parallel_size
        own = rank * count // size if spec.shard_dim is None else 0

        def of(key: str) -> Shard:
            return Shard(lambda rank: self.state(name, own + rank)[key], count, spec, stored, shape, rank, first_expert)

        return {key: of(key) if is_flat(value) else value for key, value in self.state(name, own).items()}

    def full_weight(self, name: str) -> Shard:
        """The full weight, without padding, from the files of weights and not of the optimizer if there are any."""
        spec, count = self.specs[name], self.layout.model_parallel_size
        return Shard(lambda rank: self.weight(name, rank), count, spec, self._stored_shape(name), spec.shape)

    def copies(self, part: slice = slice(None), *, optimizer: bool = True) -> Iterator[tuple[str, list[Stored]]]:
        """(name, copies) of each tensor that is replicated over tensor-parallel ranks, for ``part`` of the parameters.

        ``optimizer`` includes optimizer state. Yields nothing without tensor parallelism.
        """
        replicated = [name for name, spec in self.specs.items() if spec.shard_dim is None]
        for name in replicated[part] if self.layout.model_parallel_size > 1 else ():
            states = [
                {**(self.state(name, rank) if optimizer else {}), "weight": self.weight(name, rank)}
                for rank in range(self.layout.model_parallel_size)
            ]
            for key in states[0]:
                if is_flat(states[0][key]):
                    yield f"{name}.{key}", [state[key] for state in states]

    def weight(self, name: str, tensor_rank: int) -> Stored:
        """A weight on a tensor-parallel rank, with all experts. Raises CheckpointError if it is missing."""
        if self.layout.zero_stage == 3:
            return self._frozen_at_zero3(name, tensor_rank)
        first = self._first_weight(name, tensor_rank)
        if not (self.specs[name].is_expert and self.layout.expert_parallel_size > 1):
            return first
        ranks = [stage * self.layout.model_parallel_size + tensor_rank for stage in self.files.stages()]
        others = next((files for rank in ranks if name in (files := self._others(rank))[0].content), None)
        if others is None:
            lacking = " and ".join(str(self.files.others(rank)[0].path) for rank in ranks)
            raise CheckpointError(f"{lacking}: no weight {name}")
        return joined([first, *(self._tensor(name, other, name, WEIGHT) for other in others)])

    def _first_weight(self, name: str, tensor_rank: int) -> Stored:
        """A weight on a tensor-parallel rank, with the experts of the first rank of the expert group only."""
        path = self.saved.path
        if self.layout.pipe_parallel_size == 0:
            file = self._module(tensor_rank)
            if name in file.find(["module"]):
                return self._tensor(name, file, "module", name)
        for index, layer in enumerate(architecture_of(self.config).layers(self.config)):
            file = self.files.opened(path / f"layer_{index:02d}-model_{tensor_rank:02d}-model_states.pt")
            inner = name.removeprefix(parameter_prefix(index, layer))
            if inner != name and self.layout.pipe_parallel_size and file.path.exists() and inner in file.content:
                return self._tensor(name, file, inner)
        raise CheckpointError(f"{path} holds no weight {name}")

    def _frozen_at_zero3(self, name: str, tensor_rank: int) -> Stored:
        """A weight that ZeRO 3 partitions into equal parts over data-parallel ranks; the last may be padded."""
        if self.saved.has_optimizer and any(name in group for group in self.files.groups(0)):
            return self.trained(name, 0, tensor_rank)[WEIGHT]
        files = [self.files.model(tensor_rank, rank) for rank in range(self.layout.zero_ranks)]
        keys = ("frozen_param_fragments", name)
        with form_errors(files[0].path):
            shapes: Shapes = files[0].content.get("frozen_param_shapes") or {}
            if name not in shapes:
                raise CheckpointError(f"{files[0].path} holds no weight {name}")
            return _divided(files, keys, 0, files[0].find(keys).numel(), self._recorded(name, files[0], shapes))

    def trained(self, name: str, stage: int, tensor_rank: int) -> State:
        """The state of a parameter that the optimizer of a stage updates."""
        mp_rank = stage * self.layout.model_parallel_size + tensor_rank
        ranks, experts = range(self.layout.zero_ranks), self.layout.expert_parallel_size
        is_divided = experts > 1 and self.specs[name].is_expert
        if self.layout.zero_stage == 3:
            parts = [self._zero3(name, mp_rank)]
        elif not self.layout.has_optimizer_partitions:
            parts = [self._zero0(name, stage, mp_rank)]
            if is_divided:
                parts += [
                    {
                        key: self._tensor(name, file, name, key) if is_flat(value) else file.entry(name, key)
                        for key, value in parts[0].items()
                    }
                    for file in self.files.others(mp_rank)
                ]
        else:
            step = experts if is_divided else 1  # experts are partitioned over the ranks with the same experts
            parts = [self._zero1_and_2(name, stage, mp_rank, ranks[rank::step]) for rank in range(step)]
        if len(steps := {float(part["step"]) for part in parts if "step" in part}) > 1:
            raise CheckpointError(f"{name}.step is {min(steps):g} and {max(steps):g} in the files of its experts")
        return {
            key: joined([part[key] for part in parts]) if is_flat(value) else value for key, value in parts[0].items()
        }

    def _zero3(self, name: str, mp_rank: int) -> State:
        """The state at ZeRO 3: each rank has a part of each parameter of a group, concatenated."""
        number, shapes = self._group_of(name, 0)
        files = [self.files.partition(rank, mp_rank) for rank in range(self.layout.zero_ranks)]
        span, place = self._spans(0, number, len(files))[name], self.files.base_optimizer(files[0])

        def of(keys: Sequence[Any]) -> Stored:
            return _divided(files, keys, span.start, span.stop - span.start, shapes[name])

        return _state(files[0], ("optimizer_state_dict", "fp32_flat_groups", number), place, number, of)

    def _zero1_and_2(self, name: str, stage: int, mp_rank: int, ranks: Sequence[int]) -> State:
        """The state at ZeRO 1 and 2: a group is one flat tensor, partitioned equally over ``ranks``.

        The order of parameters in it is the order of the group. ``param_slice_mappings`` in the files has another order
        with round-robin gradients.
        """
        number, shapes = self._group_of(name, stage)
        first = self.files.partition(ranks[0], mp_rank)
        weights = ("optimizer_state_dict", "single_partition_of_fp32_groups", number)
        if not isinstance(part := first.find(weights), Tensor):
            raise wrong(first.path, name_of(weights), outline(part), "a tensor")
        length = part.numel()
        spans = self._spans(stage, number, alignment=self.layout.parameter_elements)
        if PADDINGS in first.find(["optimizer_state_dict"]):
            expected = [after.start - before.stop for before, after in pairwise(spans.values())] + [0]
            if (found := first.find(["optimizer_state_dict", PADDINGS, number])) != expected:
                raise wrong(first.path, f"{PADDINGS}[{number}]", str(found), str(expected))
        span = spans[name]
        if span.stop > length * len(ranks):
            raise wrong(first.path, name_of(weights), f"of {length:,} elements", f"longer, since {name} is in it")
        holders = range(span.start // length, min(-(-span.stop // length), len(ranks)))

        def of(keys: Sequence[Any]) -> Stored:
            bounds = ((max(span.start - at * length, 0), min(span.stop - at * length, length)) for at in holders)
            files = (self.files.partition(ranks[at], mp_rank) for at in holders)
            return Stored([Piece(file, keys, *ends) for file, ends in zip(files, bounds, strict=True)], shapes[name])

        return _state(first, weights, self.files.base_optimizer(first), number, of)

    def _zero0(self, name: str, stage: int, mp_rank: int) -> State:
        """The state at ZeRO 0: a tensor for each parameter or, with DeepSpeed's fused wrapper, for each group.

        In fp32 there are no master weights.
        """
        index, shapes = self._group_of(name, stage)
        file = self.files.model(mp_rank)
        place, optimizer = self.files.base_optimizer(file), file.find(["optimizer"])
        if "fp32_groups_flat" in optimizer:
            span = self._spans(stage, index)[name]

            def in_group(keys: Sequence[Any]) -> Stored:
                return Stored([Piece(file, keys, span.start, span.stop)], shapes[name])

            return _state(file, ("optimizer", "fp32_groups_flat", index), place, index, in_group)
        position = list(shapes).index(name)
        weights = ("optimizer", "fp32_groups", index, position)

        def of(keys: Sequence[Any]) -> Stored:
            if keys == weights and "fp32_groups" not in optimizer:
                return self._first_weight(name, mp_rank % self.layout.model_parallel_size)
            return self._tensor(name, file, *keys)

        number = sum(map(len, self.files.groups(stage)[:index])) + position
        return _state(file, weights, place, number, of)

    def _group_of(self, name: str, stage: int) -> tuple[int, Shapes]:
        """(number, shapes) of the parameter group with a parameter, in the order of the model unless round-robin."""
        number, group = next((number, group) for number, group in enumerate(self.files.groups(stage)) if name in group)
        self._recorded(name, self.files.model(stage * self.layout.model_parallel_size), group)
        self._check_order(stage, number)
        return number, group

    def _compare_order(self, stage: int, number: int) -> None:
        """Raise CheckpointError if a parameter group of a stage is not in the order of the model."""
        group = self.files.groups(stage)[number]
        reorders = self.saved.config.get("zero", {}).get("zero_round_robin_gradients", False)
        for found, expected in zip(group, (own for own in self.specs if own in group), strict=True):
            if found != expected and not reorders:
                file = self.files.model(stage * self.layout.model_parallel_size)
                raise wrong(file.path, f"a parameter of group {number}", found, expected)

    def _spans_of(self, stage: int, number: int, parts: int = 1, alignment: int = 1) -> dict[str, slice]:
        """Spans of a group's parameters, or of one of ``parts`` of each; each begins at a multiple of ``alignment``."""
        spans, start = {}, 0
        for name, shape in self.files.groups(stage)[number].items():
            spans[name] = slice(start, start + math.ceil(shape.numel() / parts))
            start = math.ceil(spans[name].stop / alignment) * alignment
        return spans

    def _stored_shape(self, name: str) -> torch.Size:
        """The shape of a tensor-parallel rank's shard of a parameter, with all experts."""
        spec, rows = self.specs[name], self.saved.model["padded_vocab_size"]
        shape = [rows, *spec.shape[1:]] if spec.is_vocabulary else [*spec.shape]
        if spec.shard_dim is not None:
            shape[spec.shard_dim] //= self.layout.model_parallel_size
        return torch.Size(shape)

    def _part_shape(self, name: str) -> torch.Size:
        """The shape of a shard in a single file, which has a part of the experts."""
        first, *others = self._stored_shape(name)
        return torch.Size([first // (self.layout.expert_parallel_size if self.specs[name].is_expert else 1), *others])

    def _tensor(self, name: str, file: StoredFile, *keys: Any) -> Stored:
        """The tensor at ``keys``, a shard's weight or a moment of it. Raises CheckpointError for another shape."""
        label = name if name.endswith(str(keys[-1])) else f"{name}.{keys[-1]}"
        check_outline(file.path, label, found := file.entry(*keys), self._part_shape(name))
        return found

    def _recorded(self, name: str, file: StoredFile, shapes: Shapes) -> torch.Size:
        """The shape of a parameter's shard in a file, which must be the one in ``shapes``, as ``file`` records it."""
        if tuple(shapes[name]) != (expected := self._part_shape(name)):
            raise wrong(file.path, f"the recorded shape of {name}", str([*shapes[name]]), str([*expected]))
        return expected

    def _checked_module(self, tensor_rank: int) -> StoredFile:
        """The file of a tensor-parallel rank's weights. Raises CheckpointError for a weight that the model lacks."""
        file = self.files.model(tensor_rank)
        with form_errors(file.path):
            self._check_known(file, file.find(["module"]).keys() - set(file.content.get("buffer_names") or ()))
        return file

    def _checked_others(self, mp_rank: int) -> list[StoredFile]:
        """The expert files of a model-parallel rank. Raises CheckpointError for a weight that the model lacks."""
        for file in (files := self.files.others(mp_rank)):
            with form_errors(file.path):
                self._check_known(file, file.content.keys())
        return files

    def _check_known(self, file: StoredFile, names: Set[str]) -> None:
        if unknown := names - self.specs.keys():
            raise CheckpointError(f"{file.path} holds {min(unknown)}, which the model does not have")


def _divided(files: Sequence[StoredFile], keys: Sequence[Any], start: int, length: int, shape: torch.Size) -> Stored:
    """A tensor of which each file has ``length`` elements from ``start`` on, the last files fewer or none."""
    counts = (min(length, shape.numel() - rank * length) for rank in range(len(files)))
    return Stored([Piece(file, keys, start, start + n) for file, n in zip(files, counts, strict=True) if n > 0], shape)


def _state(
    file: StoredFile, weights: Sequence[Any], place: Sequence[Any], number: int, of: Callable[[Sequence[Any]], Stored]
) -> State:
    """The state of tensor ``number`` in the optimizer at key path ``place``, without Adafactor's sums.

    ``of`` maps a key path to the parameter's part of the tensor there.
    """
    state: State = {WEIGHT: of(weights)}
    with form_errors(file.path):
        stored = numbered_state(file.path, file.find(place), number)
    for key, value in stored.items():
        if key not in _OF_MATRICES:
            keys = (*place, "state", number, key)
            if isinstance(value, Tensor):
                value = of(keys) if value.dim() else file.entry(*keys)
            state[key] = value
    return state
