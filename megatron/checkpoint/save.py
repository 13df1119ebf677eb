"""Saves checkpoints in DeepSpeed's format, with Megatron's tracker file.

A save has three steps: every rank collects its state from the engine, every rank writes it into an unfinished folder,
and when everything is on disk, rank 0 commits the folder as the newest checkpoint.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint import tracker
from megatron.checkpoint.collective_errors import gathered_on_rank_0, on_rank_0
from megatron.checkpoint.commit import begin_tag, commit_tag, remove_unfinished, unfinished
from megatron.checkpoint.engine_files import (
    EngineFiles,
    HostCopies,
    PinnedCopies,
    StateFile,
    bytes_of,
    own_experts,
    pinned_copies,
)
from megatron.checkpoint.files import FILE_OVERHEAD, Record, check_disk_space, disk_errors, make_folder, replace_text
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.load import random_states, rng_file
from megatron.checkpoint.run_file import RUN_FILE, SavedRun, describe
from megatron.checkpoint.sample_history import Segment
from megatron.checkpoint.schema import CHECKPOINT_VERSION
from megatron.checkpoint.tensor_files import with_identity, write_files
from megatron.common.checkpoint_folders import rank_file_path
from megatron.common.errors import CheckpointError, UserError, first_line
from megatron.config import ModelConfig, RunConfig
from megatron.engines.state import optimizer_name, parameter_shapes, save_state
from megatron.model.architectures import architecture_of

SETTINGS_FILE = "run.yaml"
"""Name of the settings file in ``--save``."""


@dataclass(frozen=True)
class _Save:
    """A checkpoint that is being written."""

    iteration: int
    size: int
    """Approximate bytes of all ranks' files."""
    stop: Event
    """Set when the writer should stop."""
    written: Future[dict[str, Record]]
    """The files of this rank."""


class Checkpointer:
    """Saves the checkpoints of a run, one at a time. Every rank must call every method.

    With ``--async-save`` a thread writes. It calls no collectives: training takes the maximum of ``state`` over all
    ranks, together with other numbers, and calls ``poll`` with it. An error is raised on all ranks. With
    ``--on-save-error continue`` it is logged instead, and raised by ``finish()`` unless a later save succeeds.

    Args:
        log: called with lines for the user.
        saved: the checkpoint that the run loads.
        lock: lock of the folder, on the rank that holds it.
        settings: content of a settings file for ``--config``, which is saved in the folder.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        run: RunConfig,
        log: Callable[[str], None],
        saved: SavedRun | None = None,
        lock: FolderLock | None = None,
        settings: str = "",
    ):
        self.engine, self._run, self._log = engine, run, log
        self._lock, self._settings = lock, settings
        self._history: Sequence[Segment] = saved.history if saved and not run.checkpoint.finetune else ()
        self._newest_is_own = not tracker.replaces_others(run, saved)
        self._folder = Path(run.checkpoint.save or "")  # without --save nothing uses it
        copies = (pinned_copies(engine) or HostCopies()) if run.checkpoint.async_save else None
        self._files = EngineFiles(copies)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: _Save | None = None
        self._failure: UserError | None = None
        engine.checkpoint_engine = self._files

    def prepare(self) -> None:
        """Make the folder of ``--save``, if it is given, with the settings of the run. Raises errors as ``save``."""
        if self._run.checkpoint.save:
            on_rank_0(disk_errors(self._folder, "ds_config.json", 0)(self._prepare))

    def save(self, iteration: int, skipped_samples: Sequence[range] = ()) -> None:
        """Start to save the checkpoint of ``iteration``, if ``--save`` is given; without ``--async-save`` also finish.

        ``skipped_samples`` are the samples that training skips, in order. Raises ResourceError if the disk is full,
        CheckpointError if files cannot be written.
        """
        if not self._run.checkpoint.save:
            return
        self._complete()
        self._guarded(iteration, lambda: self._begin(iteration, skipped_samples))
        if not self._run.checkpoint.async_save:
            self._complete()

    @property
    def can_go_back(self) -> bool:
        """Whether the folder holds a checkpoint, and the newest one is of the run that goes on."""
        return bool(self._run.checkpoint.save) and self._newest_is_own and tracker.holds_checkpoint(self._folder)

    @property
    def state(self) -> int:
        """1 while this rank writes, 2 if writing failed; 0 if it is done, or there is nothing to write."""
        if self._in_flight is None:
            return 0
        written = self._in_flight.written
        return (2 if written.exception() else 0) if written.done() else 1

    def poll(self, state: float) -> None:
        """Commit a written checkpoint if the maximum ``state`` of all ranks allows it. Raises as ``save()`` does."""
        if self._in_flight is None or state == 1:
            return
        if state == 2:
            self._in_flight.stop.set()
        self._complete()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises the error of the newest save, if it failed."""
        self._complete()
        if self._failure is not None:
            raise self._failure

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _prepare(self) -> None:
        make_folder(self._folder)
        remove_unfinished(self._folder)
        replace_text(self._folder / "ds_config.json", json.dumps(self._run.ds_config, indent=2) + "\n")
        if self._settings:
            replace_text(self._folder / SETTINGS_FILE, self._settings)

    def _begin(self, iteration: int, skipped_samples: Sequence[range]) -> None:
        """Collect the state, and start the writer."""
        folder, tag, what = self._folder, tracker.tag_name(iteration), _name(iteration)
        path = unfinished(folder, tag)

        @disk_errors(folder, what, 0)
        def begin() -> None:
            self._check_lock()
            begin_tag(folder, tag)

        on_rank_0(begin)
        files = self.collect(iteration, skipped_samples, path, self._files)
        files = [(rank_file_path(file, dist.get_world_size()), content) for file, content in files]

        def checked(sizes: list[int]) -> int:
            check_disk_space(folder, f"--save {folder}: {what}", sum(sizes))
            return sum(sizes)

        size = gathered_on_rank_0(lambda: sum(bytes_of(state) + FILE_OVERHEAD for _, state in files), checked)
        stop = Event()

        def write() -> dict[str, Record]:
            self._files.wait()
            return write_files(files, path, stop)

        written = self._writer.submit(write)
        self._in_flight = _Save(iteration, size, stop, written)

    def reserve(self, iteration: int, files: EngineFiles | None = None) -> None:
        """Allocate the pinned memory for copies of the state into ``files``, so that the first save need not wait."""
        files = files or self._files
        if isinstance(files.copies, PinnedCopies) and not self._run.zero.uses_nvme:  # DeepSpeed would copy its files
            self.collect(iteration, (), self._folder / tracker.tag_name(iteration), files)
            files.wait()

    def collect(
        self, iteration: int, skipped_samples: Sequence[range], path: Path, files: EngineFiles
    ) -> list[StateFile]:
        """The files that this rank must write into the folder ``path``. DeepSpeed saves into ``files``."""
        engine, run = self.engine, self._run
        description = describe(run, iteration, skipped_samples, self._history)
        description["optimizer"] = optimizer_name(engine.basic_optimizer)
        description["lr_scheduler"] = engine.lr_scheduler.schedule.settings()
        client_state = {
            "iteration": description["iteration"],
            "consumed_samples": description["consumed_samples"],
            "tokens": description["consumed_tokens"],
            "checkpoint_version": CHECKPOINT_VERSION,
            "args": description["config"],
            **_conversion_info(engine, run),
        }
        if run.checkpoint.no_save_optim:
            client_state["optimizer"] = None  # replaces DeepSpeed's own entry
        save_state(engine, files, path, client_state, optimizer=not run.checkpoint.no_save_optim)
        if (experts := own_experts(engine, run, path)) is not None:
            file, states = experts
            files.save(states, str(file))
        collected = files.take()
        if not run.checkpoint.no_save_rng:
            collected.append((rng_file(path, dist.get_rank()), random_states()))
        collected = [(file, with_identity(content, file.name, iteration)) for file, content in collected]
        if dist.get_rank() == 0:
            collected.append((path / RUN_FILE, json.dumps(description, indent=2) + "\n"))
        return collected

    def _complete(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        save, self._in_flight = self._in_flight, None
        if save is not None:
            self._guarded(save.iteration, lambda: self._commit(save))

    def _commit(self, save: _Save) -> None:
        """Wait for the writers of all ranks, and commit the checkpoint as the newest."""
        folder, what = self._folder, _name(save.iteration)

        @disk_errors(folder, what, save.size)
        def written() -> dict[str, Record]:
            try:
                return save.written.result()
            except (OSError, UserError):
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {first_line(error)}"
                raise CheckpointError(
                    f"--save {folder}: {what} cannot be written: rank {dist.get_rank()} ended with {cause}; "
                    "earlier checkpoints are not affected"
                ) from error

        @disk_errors(folder, what, save.size)
        def commit(manifests: list[dict[str, Record]]) -> None:
            self._check_lock()
            records = {name: record for manifest in manifests for name, record in manifest.items()}
            commit_tag(folder, save.iteration, records, self._run.checkpoint)

        gathered_on_rank_0(written, commit)
        self._failure, self._newest_is_own = None, True
        self._log(f"  saved {folder / tracker.tag_name(save.iteration)}")

    def _guarded(self, iteration: int, step: Callable[[], None]) -> None:
        """Run a step of a save. If it fails, on all ranks then, undo the save and apply ``--on-save-error``."""
        try:
            step()
        except UserError as error:
            path = unfinished(self._folder, tracker.tag_name(iteration))
            on_rank_0(lambda: shutil.rmtree(path, ignore_errors=True))  # if the disk allows it
            if self._run.checkpoint.on_save_error == "stop":
                raise
            self._failure = error
            self._log(f"  warning: {error}; training continues")


def _name(iteration: int) -> str:
    return f"the checkpoint of iteration {iteration}"


def _conversion_info(engine: DeepSpeedEngine, run: RunConfig) -> dict[str, Any]:
    """Client state that DeepSpeed's own conversion to a universal checkpoint needs, and DeepSpeed does not save."""
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": run.model.vocab_size,
        "padded_vocab_size": run.model.padded_vocab_size,
        **parameter_patterns(run.model),
    }
    # Only with ZeRO DeepSpeed itself saves the names of the optimizer's parameters.
    shapes = {} if run.zero.zero_stage else {"param_shapes": parameter_shapes(engine)}
    return {"universal_checkpoint_info": info, **shapes}


def parameter_patterns(model: ModelConfig) -> dict[str, list[str]]:
    """Patterns of parameter names with which DeepSpeed's own conversion merges tensor-parallel shards."""
    named = architecture_of(model).named_parameters(model)
    specs = {f"{re.escape(name)}$": spec for name, spec in named.items()}
    return {
        "vocabulary_parameter_patterns": [name for name, spec in specs.items() if spec.is_vocabulary],
        "tp_replicated_parameter_patterns": [name for name, spec in specs.items() if spec.shard_dim is None],
        "parameter_with_row_parallelism_patterns": [name for name, spec in specs.items() if spec.shard_dim == 1],
        "pipeline_replicated_parameter_patterns": [name for name in specs if name.startswith("tied_modules")],
    }
