"""DeepSpeed's pipeline module with any number of model chunks on a stage.

DeepSpeed 0.19.8: runtime/pipe/module.py holds one run of layers, dualpipev.py two, in the shape of a V.
Test: tests/training/test_schedules_agree.py. Remove together with ``megatron.engines.schedules``.
"""

from typing import Any

from megatron.engines.engine import ExplicitPipelineModule
from megatron.parallel.pipeline.schedule import Schedule


class ChunkedPipelineModule(ExplicitPipelineModule):
    """A pipeline module with the model chunks that ``schedule`` gives to each stage; one is exposed at a time."""

    schedule: Schedule
    """A subclass sets it before anything else. Its number of micro-batches does not matter here."""

    def _partition_layers(self, method: str) -> None:
        assert self.parts[-1] == self._num_layers and len(self.parts) - 1 == self.num_stages * self.schedule.chunks
        self.chunks = self.schedule.chunks_of(self.stage_id)

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer, by its number in the model."""
        chunk = next(number for number, end in enumerate(self.parts[1:]) if layer_idx < end)
        return self.schedule.stage_of(chunk)

    def _build(self) -> None:
        self._layers_of_chunks: list[list[Any]] = []
        for chunk in self.chunks:
            self._set_bounds(self.parts[chunk], self.parts[chunk + 1])
            self.forward_funcs: list[Any] = []
            super()._build()
            self._layers_of_chunks.append(self.forward_funcs)
        self.expose(0)

    def expose(self, number: int) -> None:
        """Let ``forward`` run the chunk of this number among those of the stage."""
        self.forward_funcs = self._layers_of_chunks[number]
        chunk = self.chunks[number]
        self._set_bounds(self.parts[chunk], self.parts[chunk + 1])

    def save_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Write the layers of all chunks."""
        for number in range(len(self.chunks)):
            self.expose(number)
            super().save_state_dict(*arguments, **options)
        self.expose(0)

    def load_state_dir(self, *arguments: Any, **options: Any) -> None:
        """Read the layers of all chunks."""
        for number in range(len(self.chunks)):
            self.expose(number)
            super().load_state_dir(*arguments, **options)
        self.expose(0)
