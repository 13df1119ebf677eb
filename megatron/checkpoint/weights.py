"""The weights of a checkpoint in one piece, from whatever layout saved them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.checkpoint.optimizer_state import WEIGHT, rank_states
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.tracker import SavedRun, whole_model_config
from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError
from megatron.model.architectures import architecture_of
from megatron.model.spec import parameter_prefix


def load_weights(module: nn.Module, saved: SavedRun) -> None:
    """Fill the whole ``module`` (a GPT2Model of tensor-parallel size 1) from ``saved``.

    Raises CheckpointError where a file or a weight is missing or has another shape.
    """
    parameters = dict(module.named_parameters())
    for name, copies in whole_weights(whole_model_config(saved), saved):
        with torch.no_grad():
            parameters[name].copy_(copies[0])


def whole_weights(config: ModelConfig, saved: SavedRun) -> Iterator[tuple[str, list[Tensor]]]:
    """Each weight of the model of ``config`` as ``saved`` has it, in the order of its layers.

    One copy where tensor-parallel ranks have a part each, and a copy from each rank where all have the whole.
    Raises CheckpointError where a file or a weight is missing or has another shape.
    """
    shards = [rank_weights(saved, rank) for rank in range(saved.description["layout"]["--model-parallel-size"])]
    for name, parameter in architecture_of(config).named_parameters(config).items():
        try:
            parts = [shard[name] for shard in shards]
        except KeyError:
            raise CheckpointError(f"{saved.folder / saved.tag} holds no weight {name}") from None
        copies = parts if parameter.shard_dim is None else [torch.cat(parts, parameter.shard_dim)]
        if parameter.is_vocabulary:
            # The padding depends on the tensor-parallel size.
            copies = [_with_rows(copy, parameter.shape[0]) for copy in copies]
        if any(copy.shape != parameter.shape for copy in copies):
            raise CheckpointError(
                f"{saved.folder / saved.tag}: {name} is {list(copies[0].shape)}, and the model's "
                f"{list(parameter.shape)}"
            )
        yield name, copies


def rank_weights(saved: SavedRun, tensor_rank: int) -> dict[str, Tensor]:
    """The weights of one tensor-parallel rank, all stages together, under the names of GPT2Model."""
    layout, folder = saved.description["layout"], saved.folder / saved.tag
    if layout["--zero-stage"] == 3:
        return {name: state[WEIGHT] for name, state in rank_states(folder, layout, tensor_rank).items()}
    if layout["--pipe-parallel-size"] == 0:
        return read_file(folder / f"mp_rank_{tensor_rank:02d}_model_states.pt")["module"]
    config = whole_model_config(saved)
    layers = architecture_of(config).layers(config)
    files = sorted(folder.glob(f"layer_*-model_{tensor_rank:02d}-model_states.pt"))
    weights = {}
    for file in files:
        index = int(file.name.split("-")[0].removeprefix("layer_"))
        prefix = parameter_prefix(index, layers[index])
        weights |= {prefix + name: tensor for name, tensor in read_file(file).items()}
    return weights


def _with_rows(table: Tensor, rows: int) -> Tensor:
    return F.pad(table[:rows], (0, 0) * (table.dim() - 1) + (0, max(rows - table.size(0), 0)))
