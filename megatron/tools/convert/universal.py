"""Converts checkpoints to DeepSpeed's universal format, which has files for each full parameter, for any layout.

    FOLDER/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": full fp32 tensor, "cat_dim": sharded dimension}
    FOLDER/zero/NAME/step.pt                               number of updates
    FOLDER/zero/optimizer_state.pt                         the optimizer's groups and loss scale
    FOLDER/zero/manifest.json                              sizes and hashes of these files
    FOLDER/mp_rank_00_model_states.pt                      schedule, iteration and other state that all ranks share
    FOLDER/source.txt                                      hashes of the source files and of these; written last

The word embedding (``vocab_tensor``) has no padding rows. At ZeRO 1 and 2 DeepSpeed itself reads such a folder
("checkpoint": {"load_universal": true}); at ZeRO 3 it does not pad the vocabulary again.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.across_ranks import check_states
from megatron.checkpoint.checks import form_errors, value_at
from megatron.checkpoint.files import Record
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.parameter_state import SavedStates, State
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.saved_layout import model_file, optimizer_file
from megatron.checkpoint.schema import Updates, check_counts, check_loss_scale, check_state
from megatron.checkpoint.stored import in_memory
from megatron.checkpoint.tensor_files import write_file
from megatron.checkpoint.tracker import UNIVERSAL
from megatron.common.errors import ConfigError, ResourceError, limit_advice
from megatron.common.files import UNFINISHED, signals_raised, sync, sync_folder
from megatron.common.reading import read_bytes
from megatron.model.spec import ParameterSpec

SHARED_FILE = "mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "zero/optimizer_state.pt"
SOURCE_FILE = "source.txt"


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
"""Keys in DeepSpeed's model files that have the same value on all ranks."""
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


def cached_universal(saved: SavedRun) -> tuple[Path, bool]:
    """The universal checkpoint next to ``saved``, and whether it was converted now, as it was absent or outdated.

    Only one process may call it. Raises CheckpointError if ``saved`` is damaged, ResourceError without disk space,
    ConfigError if something else has that name.
    """
    target = saved.folder / f"{saved.tag}{UNIVERSAL}"
    try:
        is_current = read_bytes(target / SOURCE_FILE).decode() == _record(saved.path, target)
    except (OSError, UnicodeDecodeError):
        is_current = False
    if not is_current:
        if os.path.lexists(target) and not (target / SOURCE_FILE).is_file():
            raise ConfigError(f"{target} exists, and is no universal checkpoint of this suite: move it away")
        convert(saved, target)
    return target, not is_current


def convert(saved: SavedRun, target: Path) -> None:
    """Convert ``saved`` to the universal checkpoint ``target``, which is replaced only when it is complete."""
    try:
        # If this process is killed, the next save into the folder removes the unfinished files.
        with (
            signals_raised(),
            tempfile.TemporaryDirectory(
                UNFINISHED, f".{target.name}.", target.parent, ignore_cleanup_errors=True
            ) as name,
        ):
            temporary = Path(name)
            _write(saved, temporary)
            for path in temporary.rglob("*"):
                sync_folder(path) if path.is_dir() else sync(path)
            temporary.chmod(saved.path.stat().st_mode & 0o777)
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
    except OSError as error:
        raise ResourceError(
            f"{target}: cannot be written ({error.strerror}); {saved.path} has to be converted: "
            f"{limit_advice(error) or 'grant write permission there, or copy the checkpoint elsewhere'}"
        ) from error


def _record(source: Path, target: Path) -> str:
    """The content of ``SOURCE_FILE``: a hash of the files in ``source``, and one of those converted from them."""
    converted = [file for file in target.rglob("*") if file.is_file() and file.name != SOURCE_FILE]
    return f"{_hash(source, [*source.iterdir()])}\n{_hash(target, converted)}\n"


def _hash(folder: Path, files: Iterable[Path]) -> str:
    """A hash of the names, sizes and times of ``files`` in ``folder``."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.relative_to(folder)}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write(saved: SavedRun, folder: Path) -> None:
    states = SavedStates(saved)
    with form_errors(saved.path):
        shared = states.files.opened(file := model_file(saved.path, saved.layout, 0)).content
        check_counts(file, shared, saved, progress=value_at(file, shared, "lr_scheduler") is not None)
        check_states(states)
        zero, records = folder / "zero", dict[str, Record]()
        for name, spec in states.specs.items():
            state = states.shard(name, spec.shape)
            check_state(saved.path, name, state, spec.shape, Updates(most=saved.iteration))
            records |= _write_parameter(zero, name, spec, in_memory(state))
        common = {"module": {}, **{key: shared[key] for key in _SHARED if key in shared}, "mp_world_size": 1}
        write_file(folder / SHARED_FILE, common)
        if saved.has_optimizer:
            write_file(folder / OPTIMIZER_FILE, _optimizer(states, shared, state.get("step")))
        write_manifest(zero, records)
    (folder / SOURCE_FILE).write_text(_record(saved.path, folder))


def _write_parameter(folder: Path, name: str, spec: ParameterSpec, state: State) -> dict[str, Record]:
    (folder / name).mkdir(parents=True)
    entries: dict[str, Any] = {} if spec.shard_dim is None else {"cat_dim": spec.shard_dim}
    entries |= {"vocab_tensor": True} if spec.is_vocabulary else {}
    contents = {
        f"{name}/{key}.pt": {"param": value.float(), **entries} if isinstance(value, Tensor) and value.dim() else value
        for key, value in state.items()
    }
    return {file: write_file(folder / file, content) for file, content in contents.items()}


def _optimizer(states: SavedStates, shared: dict[str, Any], step: Any) -> dict[str, Any]:
    """Hyperparameters and loss scale, under the names that DeepSpeed reads at its ZeRO stages."""
    saved = states.saved
    if saved.layout.has_optimizer_partitions:
        file = optimizer_file(saved.path, saved.layout, 0, 0)
        state = states.files.opened(file).content["optimizer_state_dict"]
    else:
        file, state = model_file(saved.path, saved.layout, 0), shared["optimizer"]
    check_loss_scale(file, state)
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state
    groups = [{**group, "params": []} for group in base["param_groups"]]
    return {
        **{key: state[key] for key in _OPTIMIZER if key in state},
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }
