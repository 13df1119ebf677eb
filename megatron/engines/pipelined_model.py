"""``PipelinedModel``: the model container of the pipeline engine, with one or several model chunks per stage.

DeepSpeed 0.19.8: runtime/pipe/module.py. ``_partition_layers`` accepts neither a list of boundaries nor FLOPs of
layers, and assumes one run of layers per stage. ``forward`` decides by class names which layers are recomputed, and
silently keeps all activations of a group that mixes layers of different classes. ``_index_tied_modules`` creates the
groups of all ranks on every rank.
Tests: tests/parallel/test_partition.py, tests/training/test_activation_checkpointing.py, test_adapter_training.py,
test_schedules_agree.py, tests/engines/test_grid.py.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor, nn

from megatron.config import ActivationConfig
from megatron.engines.containers import Layers, loss_parts, run_layers
from megatron.engines.overrides import expect, overrides, replaced
from megatron.model.loss import LossFn
from megatron.model.t5 import without_bias
from megatron.model.transformer import HiddenStates
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Schedule

expect(PipelineModule, "_set_bounds", "(self, start=None, stop=None)")


class PipelinedModel(PipelineModule):
    """A model whose list of layers is split at ``partition_boundaries`` into the chunks of ``schedule``; ZeRO 0 or 1.

    One chunk of a stage is exposed at a time. The number of micro-batches in ``schedule`` is not used.
    """

    def __init__(
        self,
        layers: Layers,
        loss_fn: LossFn,
        activation: ActivationConfig,
        layout: ParallelLayout,
        *,
        partition_boundaries: Sequence[int],
        schedule: Schedule,
    ):
        self.layers_per_checkpoint = activation.layers_together
        self.parts, self.schedule = list(partition_boundaries), schedule
        self._layout = layout
        with replaced(pipe_module, PipelineParallelGrid=partial(LayoutGrid, layout)):
            super().__init__(layers=layers, loss_fn=loss_fn, topology=layout.pipeline_topology)

    @overrides(PipelineModule, "(self, method='uniform')")
    def _partition_layers(self, method: str = "uniform") -> None:
        assert self.parts[-1] == self._num_layers and len(self.parts) - 1 == self.num_stages * self.schedule.chunks
        self.chunks = self.schedule.chunks_of(self.stage_id)

    @overrides(PipelineModule, "(self, forward_input)")
    def forward(self, forward_input: HiddenStates) -> Any:
        """Run the exposed chunk."""
        outputs = run_layers(self.forward_funcs, forward_input, self.layers_per_checkpoint if self.training else 0)
        return outputs if isinstance(outputs, Tensor) else without_bias(outputs)

    @overrides(PipelineModule, "(self)")
    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """Terms of the last loss, which DeepSpeed averages and broadcasts together with the loss."""
        return loss_parts(self) or None

    @overrides(PipelineModule, "(self, layer_idx)")
    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds the layer with this index."""
        chunk = next(number for number, end in enumerate(self.parts[1:]) if layer_idx < end)
        return self.schedule.stage_of(chunk)

    @overrides(PipelineModule, "(self)")
    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Tied key to the ranks of this pipeline that hold the module, and their process group."""
        stages: dict[str, set[int]] = {}
        for index, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                stages.setdefault(spec.key, set()).add(self.stage_owner(index))
        tied = {}
        for key in sorted(stages) if self.num_stages > 1 else ():
            group, ranks = self._layout.group_of_stages(sorted(stages[key]))
            if self.stage_id in stages[key]:
                module = self.tied_modules[key]
                tied[key] = {
                    "ranks": ranks, "group": group, "weight_attr": self.tied_weight_attrs[key], "module": module
                }  # fmt: skip
                if self.global_rank != ranks[0]:  # counted once in norms
                    for parameter in module.parameters():
                        parameter.ds_pipe_replicated = True
        return tied

    @overrides(PipelineModule, "(self)")
    def _build(self) -> None:
        self._layers_of_chunks: list[list[Any]] = []
        for chunk in self.chunks:
            self._set_bounds(self.parts[chunk], self.parts[chunk + 1])
            self.forward_funcs: list[Any] = []
            super()._build()
            self._layers_of_chunks.append(self.forward_funcs)
        self.expose(0)

    def expose(self, number: int) -> None:
        """Make ``forward`` run the chunk with this index on the stage."""
        self.forward_funcs = self._layers_of_chunks[number]
        chunk = self.chunks[number]
        self._set_bounds(self.parts[chunk], self.parts[chunk + 1])

    def _each_chunk(self) -> Iterator[None]:
        """Expose each chunk in turn, and then the first one again."""
        for number in range(len(self.chunks)):
            self.expose(number)
            yield
        self.expose(0)

    @overrides(PipelineModule, "(self, save_dir, checkpoint_engine, exclude_frozen_params=False)")
    def save_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Write the layers of all chunks."""
        for _ in self._each_chunk():
            super().save_state_dict(*arguments, **options)

    def layer_files(self, folder: Path) -> Iterator[tuple[Path, nn.Module]]:
        """The layers of all chunks that have weights, each with its file in the checkpoint ``folder``."""
        for _ in self._each_chunk():
            for index, layer in enumerate(self.forward_funcs):
                if isinstance(layer, nn.Module):
                    yield Path(self.ckpt_layer_path(str(folder), index)), layer

    @overrides(PipelineModule, "(self, load_dir, checkpoint_engine, strict=True)")
    def load_state_dir(self, *arguments: Any, **options: Any) -> None:
        """Read the layers of all chunks."""
        for _ in self._each_chunk():
            super().load_state_dir(*arguments, **options)


class LayoutGrid(PipelineParallelGrid):
    """DeepSpeed's pipeline grid with the process groups of ``layout``.

    DeepSpeed 0.19.8: runtime/pipe/topology.py, ``PipelineParallelGrid`` creates the groups of all ranks of the world on
    every rank sequentially, and searches the lists of all pipelines for each rank.
    Test: tests/engines/test_grid.py. Remove when it accepts groups.
    """

    @overrides(PipelineParallelGrid, "(self, topology=None, process_group=None)")
    def __init__(self, layout: ParallelLayout, topology: Any, process_group: Any = None) -> None:
        self.global_rank, self.world_size, self._topo = layout.rank, dist.get_world_size(), topology
        data_group = layout.get_sequence_data_parallel_group()
        self.pipe_parallel_size, self.stage_id = layout.pipe_group.size(), layout.pipe_group.rank()
        self.data_parallel_size, self.data_parallel_id = data_group.size(), data_group.rank()
        self.model_parallel_size = self.slice_parallel_size = layout.tensor_group.size()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.ds_model_proc_group = layout.model_group
        self.ds_model_rank, self.ds_model_world_size = layout.model_group.rank(), layout.model_group.size()
        self.dp_proc_group, self.dp_group = data_group, dist.get_process_group_ranks(data_group)
        self.pp_proc_group, self.pp_group = layout.pipe_group, dist.get_process_group_ranks(layout.pipe_group)
        self.slice_proc_group = layout.tensor_group
        self.slice_group = dist.get_process_group_ranks(layout.tensor_group)
        self.p2p_groups: list[list[int]] = []  # only for torch versions without send and recv
