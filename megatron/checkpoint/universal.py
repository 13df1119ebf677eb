"""A checkpoint without a layout, in DeepSpeed's universal format: every parameter whole, in files of its own.

    FOLDER/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": whole tensor in fp32, "cat_dim": where TP cuts it}
    FOLDER/zero/NAME/step.pt                               updates so far
    FOLDER/zero/optimizer_state.pt                         the optimizer's groups and loss scale
    FOLDER/mp_rank_00_model_states.pt                      schedule, iteration and other things that ranks share
    FOLDER/source.txt                                      a hash of the files it was made from; written last

The word embedding (``vocab_tensor``) is without the rows that pad it. At ZeRO 1 and 2 DeepSpeed itself reads
such a folder ("checkpoint": {"load_universal": true}); at 3 it does not pad the vocabulary again.
"""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.checkpoint.files import sync, sync_folder
from megatron.checkpoint.master_weights import parameter_shapes
from megatron.checkpoint.optimizer_state import WEIGHT, State, has_partitions, model_file, rank_states
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.tracker import UNIVERSAL, SavedRun, whole_model_config
from megatron.checkpoint.weights import rank_weights
from megatron.config import ModelConfig, RunConfig
from megatron.config.errors import ResourceError
from megatron.model.architectures import architecture_of
from megatron.model.spec import ParameterSpec

SOURCE = "source.txt"


def conversion_info(engine: DeepSpeedEngine, run: RunConfig) -> dict[str, Any]:
    """What a conversion needs and would not find in DeepSpeed's files, to be saved with the client's state."""
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": run.model.vocab_size,
        "padded_vocab_size": run.model.padded_vocab_size,
        **parameter_patterns(run.model),
    }
    # DeepSpeed itself saves with ZeRO alone which parameters the optimizer's tensors are.
    shapes = {} if run.zero.zero_stage else {"param_shapes": parameter_shapes(engine)}
    return {"universal_checkpoint_info": info, **shapes}


def parameter_patterns(model: ModelConfig) -> dict[str, list[str]]:
    """Regular expressions of parameter names, by which DeepSpeed's own conversion merges tensor-parallel shards."""
    specs = architecture_of(model).named_parameters(model)

    def matching(condition: Callable[[str, ParameterSpec], bool]) -> list[str]:
        return [f"{re.escape(name)}$" for name, spec in specs.items() if condition(name, spec)]

    return {
        "vocabulary_parameter_patterns": matching(lambda _, spec: spec.is_vocabulary),
        "tp_replicated_parameter_patterns": matching(lambda _, spec: spec.shard_dim is None),
        "parameter_with_row_parallelism_patterns": matching(lambda _, spec: spec.shard_dim == 1),
        "pipeline_replicated_parameter_patterns": matching(lambda name, _: name.startswith("tied_modules.")),
    }


def point_to(folder: Path) -> None:
    """Let DeepSpeed find the universal checkpoint ``folder`` where it is told no tag."""
    (folder.parent / "latest_universal").write_text(folder.name)


def read_state(folder: Path, name: str, *, optimizer: bool = True) -> State:
    """The whole state of the parameter ``name`` in the universal checkpoint ``folder``, or its weight alone."""
    place = folder / "zero" / name
    files = sorted(place.glob("*.pt")) if optimizer else [place / f"{WEIGHT}.pt"]
    contents = {file.stem: read_file(file) for file in files}
    return {key: value["param"] if isinstance(value, dict) else value for key, value in contents.items()}


def read_shared(folder: Path) -> dict[str, Any]:
    """What all ranks share in the universal checkpoint ``folder``."""
    return read_file(folder / "mp_rank_00_model_states.pt")


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's groups and loss scale in the universal checkpoint ``folder``."""
    return read_file(folder / "zero" / "optimizer_state.pt")


_SHARED = (
    "iteration",
    "consumed_samples",
    "tokens",
    "checkpoint_version",
    "lr_scheduler",
    "global_steps",
    "global_samples",
    "skipped_steps",
    "dp_world_size",
    "ds_version",
    "universal_checkpoint_info",
)
"""Of what DeepSpeed saves of each rank, what is the same on all."""
_OPTIMIZER = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "ds_version",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
)


def cached(saved: SavedRun) -> tuple[Path, bool]:
    """The universal form of ``saved``, beside its tag, made where it is not there yet, and whether it was made now.

    One process calls it. Raises CheckpointError where ``saved`` is not whole, ResourceError where there is no room.
    """
    target = saved.folder / f"{saved.tag}{UNIVERSAL}"
    if is_universal_of(target, saved):
        return target, False
    convert(saved, target)
    return target, True


def is_universal_of(folder: Path, saved: SavedRun) -> bool:
    """Whether ``folder`` was made from the files that ``saved`` has now."""
    try:
        return (folder / SOURCE).read_text() == _stamp(saved)
    except OSError:
        return False


def convert(saved: SavedRun, target: Path) -> None:
    """Write the universal form of ``saved`` as ``target``, all at one instant, in place of what may be there."""
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write(saved, aside)
            for path in aside.rglob("*"):
                sync_folder(path) if path.is_dir() else sync(path)
            aside.chmod((saved.folder / saved.tag).stat().st_mode & 0o777)
            if target.exists():
                shutil.rmtree(target)
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # where a disk is full, torch raises the latter
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ResourceError(
            f"{target}: cannot be written ({reason}); {saved.folder / saved.tag} was saved on another layout "
            "and has to be converted: make room or give permission there, or copy the checkpoint elsewhere"
        ) from error


def _stamp(saved: SavedRun) -> str:
    digest = hashlib.sha256()
    for file in sorted((saved.folder / saved.tag).iterdir()):
        stat = file.stat()
        digest.update(f"{file.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write(saved: SavedRun, folder: Path) -> None:
    stamp = _stamp(saved)
    config = whole_model_config(saved)
    specs = architecture_of(config).named_parameters(config)
    steps = [_write_parameter(folder / "zero" / name, specs[name], parts) for name, parts in _parameters(saved)]
    place, layout = saved.folder / saved.tag, saved.description["layout"]
    shared = read_file(model_file(place, layout, 0))
    common = {"module": {}, **{key: shared[key] for key in _SHARED if key in shared}, "mp_world_size": 1}
    torch.save(common, folder / "mp_rank_00_model_states.pt")
    if saved.description["has_optimizer"]:
        torch.save(_optimizer(place, layout, shared, steps[0]), folder / "zero" / "optimizer_state.pt")
    (folder / SOURCE).write_text(stamp)


def _parameters(saved: SavedRun) -> Iterator[tuple[str, list[State]]]:
    """Each parameter once, and its state on each tensor-parallel rank. Holds one stage in memory at a time."""
    place, layout = saved.folder / saved.tag, saved.description["layout"]
    ranks = range(layout["--model-parallel-size"])
    if not saved.description["has_optimizer"]:
        shards = [rank_weights(saved, rank) for rank in ranks]
        for name in shards[0]:
            yield name, [{WEIGHT: shard[name].float().clone()} for shard in shards]
        return
    # In fp32 without ZeRO the optimizer steps on the weights themselves, which lie elsewhere.
    needs_weights = not has_partitions(layout) and layout["precision"] == "fp32"
    weights = [rank_weights(saved, rank) if needs_weights else None for rank in ranks]
    seen: set[str] = set()
    for stage in range(max(layout["--pipe-parallel-size"], 1)):
        shards = [rank_states(place, layout, stage * len(ranks) + rank, weights[rank]) for rank in ranks]
        for name in shards[0]:
            if name not in seen:
                yield name, [shard[name] for shard in shards]
        seen |= shards[0].keys()


def _write_parameter(folder: Path, spec: ParameterSpec, parts: Sequence[State]) -> Any:
    """Write one parameter from its parts on the tensor-parallel ranks; its step count."""
    folder.mkdir(parents=True)
    dim = spec.shard_dim
    for key, value in parts[0].items():
        if not (isinstance(value, Tensor) and value.dim()):
            torch.save(value, folder / f"{key}.pt")
            continue
        whole: dict[str, Any] = {"param": value if dim is None else torch.cat([part[key] for part in parts], dim)}
        whole |= {} if dim is None else {"cat_dim": dim}
        if spec.is_vocabulary:
            whole |= {"param": whole["param"][: spec.shape[0]].clone(), "vocab_tensor": True}  # without padding
        torch.save(whole, folder / f"{key}.pt")
    return parts[0].get("step")


def _optimizer(place: Path, layout: Mapping[str, Any], shared: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """Hyperparameters and loss scale, under the names that DeepSpeed looks for at each of its stages."""
    prefix = "bf16_" if layout["precision"] == "bf16" else ""
    if has_partitions(layout):
        state = read_file(place / f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    else:
        state = shared["optimizer"]
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state
    groups = [{**group, "params": []} for group in base["param_groups"]]
    return {
        **{key: state[key] for key in _OPTIMIZER if key in state},
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }
