"""Which checkpoint a folder offers, found without torch and before anything starts.

SAVE/latest                               name of the newest tag, read by DeepSpeed
SAVE/latest_checkpointed_iteration.txt    its iteration, read by Megatron
SAVE/global_stepN/run.json                what was saved; written last, so it marks a whole tag
"""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.fit import check_fit, layout_of, schedule_of, settings_of
from megatron.config import RunConfig
from megatron.errors import CheckpointError

LATEST = "latest"
TRACKER = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class SavedRun:
    """A whole tag of a checkpoint folder, and what its ``run.json`` says."""

    folder: Path
    tag: str
    description: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.description["iteration"]


def resolve(run: RunConfig) -> SavedRun | None:
    """The checkpoint that ``--load`` means, or None where the run starts fresh.

    Raises CheckpointError where there is none, where it is broken, and where it does not fit the run.
    """
    config = run.checkpoint
    if config.load is None:
        return None
    folder = Path(config.load)
    is_also_save = config.save is not None and folder.resolve() == Path(config.save).resolve()
    if is_also_save and _is_empty(folder):
        return None
    saved = newest(folder)
    check_fit(saved.description, saved.folder / saved.tag, run)
    return saved


def newest(folder: str | Path) -> SavedRun:
    """The checkpoint that ``folder`` points to.

    Raises CheckpointError where there is none or where it is broken.
    """
    folder = Path(folder)
    if _is_empty(folder):
        raise CheckpointError(f"--load {folder}: no checkpoint there; name a folder that holds one")
    return _read(folder, _latest_tag(folder))


def tag_at(path: Path) -> SavedRun:
    """The checkpoint that is the folder ``path`` itself. Raises CheckpointError where it is not whole."""
    return _read(path.parent, path.name)


def publish(folder: Path, tag: str, iteration: int) -> None:
    """Point both tracker files to ``tag``; each changes at one instant."""
    _replace_text(folder / LATEST, tag)
    _replace_text(folder / TRACKER, str(iteration))


def describe(run: RunConfig, iteration: int) -> dict[str, Any]:
    """What ``run.json`` says of a tag saved after ``iteration``."""
    samples = run.train.consumed_samples(iteration)
    return {
        "iteration": iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * run.data.seq_length,
        "layout": layout_of(run),
        "settings": settings_of(run),
        "schedule": schedule_of(run),
        "has_optimizer": not run.checkpoint.no_save_optim,
        "has_rng": not run.checkpoint.no_save_rng,
        "config": dataclasses.asdict(run),
    }


def write_description(tag_folder: Path, description: dict[str, Any]) -> None:
    """Write ``run.json``, which says that all else of the tag stands."""
    _replace_text(tag_folder / RUN_FILE, json.dumps(description, indent=2) + "\n")


def keep_ds_config(run: RunConfig, folder: Path) -> None:
    """Write the finished DeepSpeed config into ``folder``, where the run will save."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace_text(folder / "ds_config.json", json.dumps(run.ds_config, indent=2) + "\n")


def _is_empty(folder: Path) -> bool:
    return not (folder / LATEST).exists() and not (folder / TRACKER).exists() and not any(folder.glob("global_step*"))


def _latest_tag(folder: Path) -> str:
    pointer = folder / LATEST
    try:
        tag = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{pointer} is missing{_suggestion(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read ({error.strerror}){_suggestion(folder)}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{pointer} holds bytes that are no text{_suggestion(folder)}") from None
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"{pointer} holds {tag[:40]!r}, which is no name of a checkpoint{_suggestion(folder)}")
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{pointer} names {tag}, which is not in {folder}{_suggestion(folder)}")
    return tag


def _read(folder: Path, tag: str) -> SavedRun:
    saved = _whole(folder, tag)
    if saved is None:
        raise CheckpointError(
            f"{folder / tag} is not whole: its {RUN_FILE}, written last, is missing or broken{_suggestion(folder)}"
        )
    return saved


def _whole(folder: Path, tag: str) -> SavedRun | None:
    """The tag, if its description is there and says what a resume must know."""
    try:
        description = json.loads((folder / tag / RUN_FILE).read_text(encoding="utf-8"))
        parts = description["layout"], description["config"]["model"]
        iteration = description["iteration"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (all(isinstance(part, dict) for part in parts) and type(iteration) is int and iteration >= 0):
        return None
    return SavedRun(folder, tag, description)


def _suggestion(folder: Path) -> str:
    tags = [_whole(folder, path.parent.name) for path in folder.glob(f"*/{RUN_FILE}")]
    whole = [saved for saved in tags if saved is not None]
    if not whole:
        return f"; no whole checkpoint is left in {folder}"
    newest = max(whole, key=lambda saved: saved.iteration).tag
    return f"; the newest whole checkpoint is {newest}: to use it, write that name into {folder / LATEST}"


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
