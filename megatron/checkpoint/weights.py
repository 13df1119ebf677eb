"""The weights of a checkpoint in one piece, from however many tensor-parallel ranks and stages saved them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.checkpoint.tracker import SavedRun
from megatron.config import ModelConfig
from megatron.errors import CheckpointError


def whole_model_config(saved: SavedRun) -> ModelConfig:
    """The model that was saved, as it is built whole on one rank and in fp32."""
    try:
        config = ModelConfig(**saved.description["config"]["model"])
    except TypeError as error:
        raise CheckpointError(f"{saved.folder / saved.tag} was saved by another version: {error}") from None
    return replace(config, padded_vocab_size=config.vocab_size, dtype="fp32")


def load_weights(module: nn.Module, saved: SavedRun) -> None:
    """Fill the whole ``module`` (a GPT2Model of tensor-parallel size 1) from ``saved``.

    Raises CheckpointError where a file or a weight is missing or has another shape.
    """
    shards = list(_shards(saved))
    for name, parameter in module.named_parameters():
        try:
            parts = [shard[name] for shard in shards]
        except KeyError:
            raise CheckpointError(f"{saved.folder / saved.tag} holds no weight {name}") from None
        dim = getattr(parameter, "partition_dim", None)
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        if name.endswith("word_embeddings.weight"):
            whole = _with_rows(whole, parameter.size(0))  # the padding depends on the tensor-parallel size
        if whole.shape != parameter.shape:
            raise CheckpointError(
                f"{saved.folder / saved.tag}: {name} is {list(whole.shape)}, and the model's {list(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(whole)


def _shards(saved: SavedRun) -> Iterator[dict[str, Tensor]]:
    """The weights of each tensor-parallel rank, under the names of GPT2Model."""
    layout, folder = saved.description["layout"], saved.folder / saved.tag
    if layout["--zero-stage"] == 3:
        raise CheckpointError(f"{folder} was saved at ZeRO 3, which scatters the weights over its optimizer files")
    for rank in range(layout["--model-parallel-size"]):
        if layout["--pipe-parallel-size"] == 0:
            yield _load(folder / f"mp_rank_{rank:02d}_model_states.pt")["module"]
        else:
            files = sorted(folder.glob(f"layer_*-model_{rank:02d}-model_states.pt"))
            yield {
                _full_name(int(file.name.split("-")[0].removeprefix("layer_")), name): tensor
                for file in files
                for name, tensor in _load(file).items()
            }


def _full_name(layer: int, name: str) -> str:
    return f"tied_modules.embed.{name}" if layer == 0 else f"{layer}.{name}"


def _load(path: Path) -> dict:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many names for a file that is not whole
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error


def _with_rows(table: Tensor, rows: int) -> Tensor:
    return F.pad(table[:rows], (0, 0, 0, max(rows - table.size(0), 0)))
