"""Save a run in DeepSpeed's layout of files, with Megatron's tracker beside it.

A save has three steps: every rank takes its state from the engine, every rank writes it into a folder that nobody
reads, and when all of it is on the disk the first rank makes that folder the newest checkpoint.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.checkpoint import tags
from megatron.checkpoint.collective_errors import on_first, together
from megatron.checkpoint.files import check_room, make_folder, on_disk
from megatron.checkpoint.load import CHECKPOINT_VERSION, random_states, rng_file
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.sample_history import Stretch
from megatron.checkpoint.tensor_files import read_checked_file, write_file
from megatron.checkpoint.tracker import describe, keep_ds_config
from megatron.checkpoint.universal import conversion_info
from megatron.config import RunConfig
from megatron.config.errors import UserError

StateFile = tuple[Path, Any]
"""A file to be written, and what goes into it."""


class EngineFiles(CheckpointEngine):
    """Keeps what DeepSpeed saves until somebody takes it, and reads without running code.

    With ``copies``, what is kept lies in host memory of its own, so that training can go on.
    """

    def __init__(self, *, copies: bool):
        super().__init__()
        self.name = "EngineFiles"
        self._copies = copies
        self._kept: list[StateFile] = []

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` for the file ``path``."""
        self._kept.append((Path(path), in_host_memory(state_dict) if self._copies else state_dict))

    def take(self) -> list[StateFile]:
        """What was kept since the last time."""
        kept, self._kept = self._kept, []
        return kept

    def load(self, path: str, map_location: Any = None) -> Any:
        """What ``path`` holds, on the CPU."""
        return read_checked_file(Path(path))

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed has to copy views, whose whole storage would be saved else; our own copies are none."""
        return not self._copies

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        make_folder(Path(path))

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def commit(self, info: Any) -> bool:
        """Nothing yet: what is kept here becomes a checkpoint later, on all ranks at once."""
        return True


def in_host_memory(item: Any) -> Any:
    """A copy of ``item``, its tensors in host memory."""
    if isinstance(item, Tensor):
        return item.detach().to("cpu", copy=True)
    if type(item) in (list, tuple):
        return type(item)(map(in_host_memory, item))
    if type(item) in (dict, OrderedDict):
        return type(item)((key, in_host_memory(value)) for key, value in item.items())
    return copy.deepcopy(item)


def bytes_of(item: Any, seen: set[int] | None = None) -> int:
    """Bytes that the tensors in ``item`` take in a file: of each storage, once."""
    seen = set() if seen is None else seen
    if isinstance(item, Tensor):
        storage = item.untyped_storage()
        is_new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if is_new else 0
    if isinstance(item, dict):
        item = item.values()
    elif not isinstance(item, (list, tuple)):
        return 0
    return sum(bytes_of(part, seen) for part in item)


@dataclass(frozen=True)
class _Save:
    """A checkpoint that is being written."""

    iteration: int
    description: dict[str, Any]
    """What ``run.json`` will say."""
    size: int
    """Bytes of all ranks' files, about."""
    stop: Event
    """Set where the writer need not go on."""
    written: "Future[Manifest]"
    """Of this rank."""


class Checkpointer:
    """Saves the checkpoints of a run, one at a time. Every rank must call every method.

    With ``--async-save`` a thread writes; it takes part in no collective: ``poll()`` asks the ranks whether all have
    written. An error is raised on all ranks alike, or with ``--on-save-error continue`` said, and raised by
    ``finish()`` if no later save mends it.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        run: RunConfig,
        say: Callable[[str], None],
        earlier: Sequence[Stretch] = (),
    ):
        self._engine, self._run, self._say = engine, run, say
        self._earlier = earlier
        """The ledger of the checkpoint that the run goes on from."""
        self._folder = Path(run.checkpoint.save) if run.checkpoint.save else None
        self._files = EngineFiles(copies=run.checkpoint.async_save)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: _Save | None = None
        self._failure: UserError | None = None
        engine.checkpoint_engine = self._files
        # It would copy scripts to --save, through links that lie there, which read checkpoints by pickle.
        engine._copy_recovery_script = lambda folder: None
        if self._folder is not None:
            on_first(on_disk(self._prepare, self._folder, "ds_config.json", 0))

    def save(self, iteration: int, left_out: Sequence[range] = ()) -> None:
        """Begin the checkpoint of ``iteration``, if there is a folder for it; without ``--async-save``, end it, too.

        ``left_out`` are samples that training goes past.

        Raises ResourceError where the disk is full, and CheckpointError where it does not take files.
        """
        if self._folder is None:
            return
        self._complete()
        self._guarded(iteration, lambda: self._begin(iteration, left_out))
        if not self._run.checkpoint.async_save:
            self._complete()

    def poll(self) -> None:
        """Make the checkpoint in flight visible, if every rank has written it. Raises what ``save()`` raises."""
        save = self._in_flight
        if save is None:
            return
        done = save.written.done()
        sound = not done or save.written.exception() is None
        state = torch.tensor([done, sound], dtype=torch.int32, device=get_accelerator().current_device_name())
        dist.all_reduce(state, dist.ReduceOp.MIN)
        all_done, all_sound = state.tolist()
        if not all_sound:
            save.stop.set()
        if all_done or not all_sound:
            self._complete()

    def finish(self) -> None:
        """Wait for the checkpoint in flight. Raises the newest save's error, if it failed."""
        self._complete()
        if self._failure is not None:
            raise self._failure

    def _prepare(self) -> None:
        make_folder(self._folder)
        tags.prune(self._folder)
        keep_ds_config(self._run, self._folder)

    def _begin(self, iteration: int, left_out: Sequence[range]) -> None:
        """Take the state, and set the writer on it."""
        folder, tag = self._folder, tags.tag_of(iteration)
        on_first(on_disk(lambda: tags.begin(folder, tag), folder, _name(iteration), 0))
        description = describe(self._run, iteration, left_out, self._earlier)
        files = self._take_state(description, folder / tags.unfinished(tag))
        size = sum(together(lambda: sum(bytes_of(state) + _ENVELOPE for _, state in files)))
        on_first(lambda: check_room(folder, _name(iteration), size))
        stop = Event()
        written = self._writer.submit(_write, files, folder / tags.unfinished(tag), stop)
        self._in_flight = _Save(iteration, description, size, stop, written)

    def _take_state(self, description: dict[str, Any], place: Path) -> list[StateFile]:
        """What this rank has to write into the folder ``place``."""
        engine, run = self._engine, self._run
        client_state = {
            "iteration": description["iteration"],
            "consumed_samples": description["consumed_samples"],
            "tokens": description["consumed_tokens"],
            "checkpoint_version": CHECKPOINT_VERSION,
            "args": description["config"],
            **conversion_info(engine, run),
        }
        saves_shards = engine.save_zero_checkpoint
        if run.checkpoint.no_save_optim:
            client_state["optimizer"] = None  # takes the place of DeepSpeed's own entry
            engine.save_zero_checkpoint = False
        engine.save_checkpoint(str(place.parent), tag=place.name, client_state=client_state, save_latest=False)
        engine.save_zero_checkpoint = saves_shards
        files = self._files.take()
        if not run.checkpoint.no_save_rng:
            files.append((rng_file(place, dist.get_rank()), random_states()))
        return files

    def _complete(self) -> None:
        """Wait for the writers of all ranks, and make what they wrote the newest checkpoint."""
        save, self._in_flight = self._in_flight, None
        if save is not None:
            self._guarded(save.iteration, lambda: self._commit(save))

    def _commit(self, save: _Save) -> None:
        folder, iteration = self._folder, save.iteration
        tag, what = tags.tag_of(iteration), _name(iteration)
        shares = together(on_disk(save.written.result, folder, what, save.size))

        def make_visible() -> None:
            records = {name: record for share in shares for name, record in share.items()}
            tags.commit(folder, tag, save.description, records)
            tags.retain(folder, iteration, self._run.checkpoint)

        on_first(on_disk(make_visible, folder, what, save.size))
        self._failure = None
        self._say(f"  saved {folder / tag}")

    def _guarded(self, iteration: int, step: Callable[[], None]) -> None:
        """Take a step of a save; where it fails, on all ranks alike, undo the save and obey ``--on-save-error``."""
        try:
            step()
        except UserError as error:
            on_first(lambda: tags.discard(self._folder, tags.tag_of(iteration)))
            if self._run.checkpoint.on_save_error == "stop":
                raise
            self._failure = error
            self._say(f"  warning: {error}; training goes on")


_ENVELOPE = 1 << 16
"""Bytes of a file beside its tensors, about."""


def _name(iteration: int) -> str:
    return f"the checkpoint of iteration {iteration}"


def _write(files: list[StateFile], place: Path, stop: Event) -> Manifest:
    """Write one file after the other, and let go of what went into it."""
    records = {}
    while files and not stop.is_set():
        path, state = files.pop()
        records[path.relative_to(place).as_posix()] = write_file(path, state)
    return records
