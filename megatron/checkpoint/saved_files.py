"""Opens the files of a checkpoint that DeepSpeed saved, each when it is first needed."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checks import form_errors, outline, value_at, wrong
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.saved_layout import expert_file, model_file, optimizer_file
from megatron.checkpoint.stored import Stored, StoredFile
from megatron.common.errors import CheckpointError

Shapes = Mapping[str, torch.Size]
"""Names and shapes of the parameters of an optimizer's parameter group, in its order."""
PADDINGS = "param_alignment_paddings"
"""Key of the numbers of elements after each parameter of each group, in the optimizer files of ZeRO 1 and 2."""


class SavedFiles:
    """The files of ``saved``. A *model-parallel rank* is stage x tensor-parallel size + tensor rank.

    Unless ``verified``, files are compared with the manifest when they are opened. Raises CheckpointError if a file is
    missing or damaged; methods raise errors that ``form_errors`` converts if its content has another form.
    """

    def __init__(self, saved: SavedRun, *, verified: bool) -> None:
        self._saved, self._layout = saved, saved.layout
        manifest = {} if verified else read_manifest(saved.path)  # once for all files
        iteration = None if verified else saved.iteration
        self.opened = cache(
            lambda file: StoredFile(file, manifest.get(file.relative_to(saved.path).as_posix()), iteration)
        )
        self.groups = cache(self._groups)

    def model(self, mp_rank: int, zero_rank: int = 0) -> StoredFile:
        """The file of a model-parallel rank; at ZeRO 3 also of a data-parallel one."""
        return self.opened(model_file(self._saved.path, self._layout, mp_rank, zero_rank))

    def all_models(self) -> list[StoredFile]:
        """The files of all model-parallel ranks; at ZeRO 3 also of all data-parallel ones."""
        zero_ranks = range(self._layout.zero_ranks if self._layout.zero_stage == 3 else 1)
        ranks = range(len(self.stages()) * self._layout.model_parallel_size)
        return [self.model(*pair) for pair in product(ranks, zero_ranks)]

    def partition(self, zero_rank: int, mp_rank: int) -> StoredFile:
        """The file of the optimizer's partition ``zero_rank``."""
        return self.opened(optimizer_file(self._saved.path, self._layout, zero_rank, mp_rank))

    def others(self, mp_rank: int) -> list[StoredFile]:
        """The expert files of a model-parallel rank: all ranks of its expert group except the first, in order."""
        ranks = range(1, self._layout.expert_parallel_size)
        return [self.opened(expert_file(self._saved.path, rank, mp_rank)) for rank in ranks]

    def stages(self) -> range:
        """The pipeline stages; a single one without a pipeline."""
        return range(max(self._layout.pipe_parallel_size, 1))

    def _groups(self, stage: int) -> Sequence[Shapes]:
        """The parameters in each parameter group of the optimizer of a stage."""
        file = self.model(stage * self._layout.model_parallel_size)
        if not (groups := file.content.get("param_shapes")):
            raise CheckpointError(
                f"{file.path} does not record which parameters its optimizer has: resume on the layout that saved it"
            )
        with form_errors(file.path):
            return [{name: torch.Size(shape) for name, shape in group.items()} for group in groups]

    def optimizers(self, part: slice) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """(file, state) of the base optimizer in ``part`` of its files, with moments as ``Stored``."""
        count = self._layout.zero_ranks if self._layout.has_optimizer_partitions else 1
        pairs = [*product(range(count), range(len(self.stages()) * self._layout.model_parallel_size))]
        for zero_rank, rank in pairs[part] if self._saved.has_optimizer else ():
            file = self.partition(zero_rank, rank) if self._layout.has_optimizer_partitions else self.model(rank)
            with form_errors(file.path):
                base = file.find(place := self.base_optimizer(file))
                states = {
                    number: {key: file.entry(*place, "state", number, key) for key in state}
                    for number, state in value_at(file.path, base, "state").items()
                }
            yield file.path, {**base, "state": states}

    def base_optimizer(self, file: StoredFile) -> tuple[str, ...]:
        """The key path of the base optimizer's state in ``file``."""
        if self._layout.zero_stage == 3:
            return "optimizer_state_dict", "optimizer_state_dict"
        if self._layout.has_optimizer_partitions:
            return "optimizer_state_dict", "base_optimizer_state"
        # Half precision has a wrapper, which earlier versions used at ZeRO 0.
        with form_errors(file.path):
            return ("optimizer", "optimizer_state_dict")[: 1 + ("optimizer_state_dict" in file.find(["optimizer"]))]


def numbered_state(place: object, base: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The state of tensor ``number`` in the optimizer ``base``, with the step count, which may be kept by the group.

    Raises CheckpointError with the file ``place`` for values other than tensors and numbers.
    """
    group: Mapping[str, Any] = next((group for group in base["param_groups"] if number in group["params"]), {})
    step = {"step": group["step"]} if "step" in group else {}
    for key, value in (state := {**step, **base["state"].get(number, {})}).items():
        if not isinstance(value, Tensor | Stored | int | float | None):
            raise wrong(place, f"state[{number}].{key}", outline(value), "a tensor or a number")
    return state
