"""DeepSpeed's universal format: a checkpoint independent of the layout, with every full parameter in its own files.

    FOLDER/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": full fp32 tensor, "cat_dim": sharded dimension}
    FOLDER/zero/NAME/step.pt                               updates so far
    FOLDER/zero/optimizer_state.pt                         the optimizer's groups and loss scale
    FOLDER/mp_rank_00_model_states.pt                      schedule, iteration and other state common to all ranks
    FOLDER/source.txt                                      a hash of the files it was made from; written last

The word embedding (``vocab_tensor``) has no padding rows. At ZeRO 1 and 2 DeepSpeed itself reads such a folder
("checkpoint": {"load_universal": true}); at 3 it does not pad the vocabulary again. Here each rank reads its
parameters, and takes its shards.
"""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.checkpoint.parameter_state import WEIGHT, State, model_file, optimizer_file, rank_weights, stage_states
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.schema import Updates, check_state, check_steps, form_errors
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.tracker import UNIVERSAL
from megatron.common.errors import CheckpointError, ResourceError, first_line
from megatron.common.files import UNFINISHED, sync, sync_folder
from megatron.common.reading import read_bytes
from megatron.config import ModelConfig, RunConfig
from megatron.engines.state import (
    MasterWeight,
    master_weights,
    moment_names,
    optimizer_notified,
    parameter_shapes,
    restore_loss_scale,
    set_step,
)
from megatron.model.architectures import architecture_of
from megatron.model.spec import ParameterSpec
from megatron.parallel.expert import expert_group_of

SHARED_FILE = "mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "zero/optimizer_state.pt"
_WEIGHTS_ALONE = Updates()
SOURCE_FILE = "source.txt"


def conversion_info(engine: DeepSpeedEngine, run: RunConfig) -> dict[str, Any]:
    """What a conversion needs and DeepSpeed does not save by itself, to be saved as client state."""
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": run.model.vocab_size,
        "padded_vocab_size": run.model.padded_vocab_size,
        **parameter_patterns(run.model),
    }
    # Only with ZeRO DeepSpeed itself saves which parameters the optimizer's tensors are.
    shapes = {} if run.zero.zero_stage else {"param_shapes": parameter_shapes(engine)}
    return {"universal_checkpoint_info": info, **shapes}


def parameter_patterns(model: ModelConfig) -> dict[str, list[str]]:
    """Regular expressions of parameter names, by which DeepSpeed's own conversion merges tensor-parallel shards."""
    named = architecture_of(model).named_parameters(model)
    specs = {f"{re.escape(name)}$": spec for name, spec in named.items()}
    return {
        "vocabulary_parameter_patterns": [name for name, spec in specs.items() if spec.is_vocabulary],
        "tp_replicated_parameter_patterns": [name for name, spec in specs.items() if spec.shard_dim is None],
        "parameter_with_row_parallelism_patterns": [name for name, spec in specs.items() if spec.shard_dim == 1],
        "pipeline_replicated_parameter_patterns": [name for name in specs if name.startswith("tied_modules")],
    }


def read_state(folder: Path, name: str, *, optimizer: bool = True) -> State:
    """The full state of the parameter ``name`` in the universal checkpoint ``folder``, or only its weight."""
    parameter_folder = folder / "zero" / name
    files = sorted(parameter_folder.glob("*.pt")) if optimizer else [parameter_folder / f"{WEIGHT}.pt"]
    # Mapped: a rank reads no more than its shard of a tensor that is cut along its first dimension.
    contents = {file.stem: read_file(file, mapped=True) for file in files}
    return {key: value["param"] if isinstance(value, dict) else value for key, value in contents.items()}


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
"""Keys in DeepSpeed's file of a rank that have the same value on all ranks."""
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
    """The universal form of ``saved``, next to its tag, and whether it was converted just now.

    One process calls it. Raises CheckpointError if ``saved`` is damaged, ResourceError without space or permission.
    """
    target = saved.folder / f"{saved.tag}{UNIVERSAL}"
    try:
        is_current = read_bytes(target / SOURCE_FILE).decode() == _source_hash(saved)
    except (OSError, UnicodeDecodeError):
        is_current = False
    if not is_current:
        convert(saved, target)
    return target, not is_current


def convert(saved: SavedRun, target: Path) -> None:
    """Write the universal form of ``saved`` as ``target``, which appears or is replaced only when it is complete."""
    try:
        # If this is killed, the next save into the folder removes what is unfinished.
        with tempfile.TemporaryDirectory(
            suffix=UNFINISHED, prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
        ) as name:
            temporary = Path(name)
            _write(saved, temporary)
            for path in temporary.rglob("*"):
                sync_folder(path) if path.is_dir() else sync(path)
            temporary.chmod(saved.path.stat().st_mode & 0o777)
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # not of torch's writer, which raises this type if a disk is full
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ResourceError(
            f"{target}: cannot be written ({reason}); {saved.path} was saved on another layout "
            "and has to be converted: free disk space or grant write permission there, or copy the checkpoint elsewhere"
        ) from error


def _source_hash(saved: SavedRun) -> str:
    digest = hashlib.sha256()
    for file in sorted(saved.path.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write(saved: SavedRun, folder: Path) -> None:
    source = _source_hash(saved)
    config = saved.whole_model_config()
    specs = architecture_of(config).named_parameters(config)
    with form_errors(saved.path):
        steps: dict[str, Any] = {}
        counted: set[int | None] = set()
        for name, parts in _parameters(saved, specs):
            state = _full_state(specs[name], parts)
            counted.add(check_state(saved.path, name, state, specs[name].shape, Updates(most=saved.iteration)))
            _write_parameter(folder / "zero" / name, specs[name], state)
            steps[name] = state.get("step")
        check_steps(saved.path, counted)
        if missing := specs.keys() - steps.keys():
            raise CheckpointError(f"{saved.path} holds no weight {min(missing)}")
        shared = read_file(model_file(saved.path, saved.layout, 0))
        common = {"module": {}, **{key: shared[key] for key in _SHARED if key in shared}, "mp_world_size": 1}
        torch.save(common, folder / SHARED_FILE)
        if saved.has_optimizer:
            step = next(iter(steps.values()))
            torch.save(_optimizer(saved, shared, step), folder / OPTIMIZER_FILE)
    (folder / SOURCE_FILE).write_text(source)


def _parameters(saved: SavedRun, names: Collection[str]) -> Iterator[tuple[str, list[State]]]:
    """Each parameter once, with its state on each tensor-parallel rank. Holds one stage in memory at a time.

    Parameters that the optimizer has come first; of the others, which are not trained, there is only the weight.
    """
    seen: set[str] = set()
    for states in stage_states(saved) if saved.has_optimizer else ():
        yield from ((name, parts) for name, parts in states.items() if name not in seen)
        seen |= states.keys()
    if seen.issuperset(names):
        return
    shards = [rank_weights(saved, rank) for rank in range(saved.layout.model_parallel_size)]
    for name in shards[0]:
        if name not in seen:
            yield name, [{WEIGHT: shard[name].float().clone()} for shard in shards]


def _full_state(spec: ParameterSpec, parts: Sequence[State]) -> State:
    """The state of a parameter, without padding, from its shards on the tensor-parallel ranks."""
    state, dim = dict(parts[0]), spec.shard_dim
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            full = value if dim is None else torch.cat([part[key] for part in parts], dim)
            state[key] = full[: spec.shape[0]].clone() if spec.is_vocabulary else full
    return state


def _write_parameter(folder: Path, spec: ParameterSpec, state: State) -> None:
    folder.mkdir(parents=True)
    remarks: dict[str, Any] = {} if spec.shard_dim is None else {"cat_dim": spec.shard_dim}
    remarks |= {"vocab_tensor": True} if spec.is_vocabulary else {}
    for key, value in state.items():
        is_tensor = isinstance(value, Tensor) and value.dim()
        torch.save({"param": value, **remarks} if is_tensor else value, folder / f"{key}.pt")


def _optimizer(saved: SavedRun, shared: dict[str, Any], step: Any) -> dict[str, Any]:
    """Hyperparameters and loss scale, under the names that DeepSpeed looks for at each of its stages."""
    if saved.layout.has_optimizer_partitions:
        state = read_file(optimizer_file(saved.path, saved.layout, 0, 0))["optimizer_state_dict"]
    else:
        state = shared["optimizer"]
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state
    groups = [{**group, "params": []} for group in base["param_groups"]]
    return {
        **{key: state[key] for key in _OPTIMIZER if key in state},
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }


def load_weights_and_optimizer(
    engine: DeepSpeedEngine,
    folder: Path,
    tensor_group: ProcessGroup,
    *,
    optimizer: bool,
    only: Container[str] | None = None,
) -> None:
    """Load the weights of the universal checkpoint ``folder`` into ``engine``, and with ``optimizer`` the moments.

    With ``only``, parameters of other names keep their values. Every rank calls it. Raises as ``load_states``.
    """
    updates = _WEIGHTS_ALONE
    if optimizer:
        with form_errors(folder / SHARED_FILE):
            shared = read_file(folder / SHARED_FILE)
            has_state = shared["skipped_steps"] < shared["iteration"]
        updates = Updates(moment_names(engine.basic_optimizer) if has_state else (), shared["iteration"])

    def read(name: str, parameter: nn.Parameter) -> State:
        full = read_state(folder, name, optimizer=optimizer)
        return {key: _local_shard(value, parameter, tensor_group) for key, value in full.items()}

    load_states(engine, read, folder, only, updates)
    if optimizer:
        restore_loss_scale(engine, read_file(folder / OPTIMIZER_FILE))


def load_states(
    engine: DeepSpeedEngine,
    read: Callable[[str, nn.Parameter], State],
    source: Path,
    only: Container[str] | None = None,
    updates: Updates = _WEIGHTS_ALONE,
) -> None:
    """Load the state that ``read`` returns of each parameter, this tensor-parallel rank's shard, into ``engine``.

    With ``only``, parameters of other names keep their values. Every rank calls it. Raises CheckpointError, which names
    ``source``, if a state is missing, or is not as its parameter and ``updates`` of those that are trained require.
    """
    steps: set[int | None] = set()
    masters = master_weights(engine)
    with optimizer_notified(engine), torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if only is not None and name not in only:
                continue
            with form_errors(source):
                state = read(name, parameter)
            needed = updates if parameter.requires_grad else _WEIGHTS_ALONE
            steps.add(check_state(source, name, state, getattr(parameter, "ds_shape", parameter.shape), needed))
            check_steps(source, steps)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(state[WEIGHT])
            if parameter in masters:
                _copy_state(masters[parameter], state, engine.basic_optimizer)


def _local_shard(value: Any, parameter: nn.Parameter, group: ProcessGroup) -> Any:
    """This rank's experts and tensor-parallel shard of a full weight or moment; a step count as it is."""
    if not (isinstance(value, Tensor) and value.dim()):
        return value
    shape = getattr(parameter, "ds_shape", parameter.shape)
    if (experts := expert_group_of(parameter)) is not None:
        value = value.chunk(experts.size())[experts.rank()]
    dim = getattr(parameter, "partition_dim", None)
    if dim is not None:
        missing = shape[dim] * group.size() - value.size(dim)
        if missing > 0 and dim == 0:
            value = F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing))  # the vocabulary's padding, without moments
        value = value.chunk(group.size(), dim)[group.rank()]
    return value


def _copy_state(master: MasterWeight, state: State, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's part of a parameter's state into the optimizer."""
    tensor, start, begin, length = master
    moments = optimizer.state[tensor]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            target = tensor if key == WEIGHT else moments.setdefault(key, torch.zeros_like(tensor))
            target.data.view(-1)[start : start + length].copy_(value.flatten()[begin : begin + length])
        else:
            set_step(optimizer, tensor, float(value))
