"""Which checkpoint a folder offers, found without torch and before anything starts.

SAVE/latest                               name of the newest tag, read by DeepSpeed
SAVE/latest_checkpointed_iteration.txt    its iteration, read by Megatron
SAVE/global_stepN/run.json                what was saved
SAVE/global_stepN/manifest.json           of which files; written last, so it marks a whole tag
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.compatibility import check_fit, layout_of, schedule_of, settings_of
from megatron.checkpoint.files import UNFINISHED, replace_text, write_text
from megatron.checkpoint.manifest import MANIFEST, Manifest, check_content, check_sizes, read_manifest, write_manifest
from megatron.checkpoint.sample_history import Stretch, as_entries, lengthened, read_ledger
from megatron.config import CheckpointConfig, ModelConfig, RunConfig
from megatron.config.errors import CheckpointError

LATEST = "latest"
TRACKER = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
UNIVERSAL = "_universal"
"""Ending of the folder beside a tag that holds it without its layout."""
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_NONE_BROKEN: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class SavedRun:
    """A whole tag of a checkpoint folder, and what its ``run.json`` says."""

    folder: Path
    tag: str
    description: dict[str, Any]
    passed_over: tuple[str, ...] = ()
    """What is wrong with the newer checkpoints that this one stands in for."""

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.description["iteration"]

    @property
    def left_out(self) -> tuple[range, ...]:
        """Samples of the stream that training goes past, in order."""
        return tuple(range(start, stop) for start, stop in self.description.get("left_out_samples", ()))

    @property
    def ledger(self) -> tuple[Stretch, ...]:
        """Which samples its iterations took. Raises CheckpointError where it cannot be read."""
        return read_ledger(self.description, str(self.folder / self.tag))


def resolve(run: RunConfig, broken: Mapping[str, str] = _NONE_BROKEN) -> SavedRun | None:
    """The checkpoint that the run goes on from, or None where it starts fresh.

    ``broken`` holds tags whose contents have been found wrong, each with the reason. Raises CheckpointError where
    there is no checkpoint, where none is whole, and where it does not fit the run.
    """
    folder = _folder(run.checkpoint)
    if folder is None:
        return None
    saved = newest(folder, strict=run.checkpoint.load_strict, broken=broken)
    check_fit(saved.description, saved.folder / saved.tag, run)
    return saved


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is anything to load in ``folder``."""
    return not _is_empty(folder)


def newest(folder: str | Path, *, strict: bool = False, broken: Mapping[str, str] = _NONE_BROKEN) -> SavedRun:
    """The checkpoint that ``folder`` points to; where that is broken, and not ``strict``, the newest whole one.

    Whole is what has a manifest and all files in it, in the right sizes, and is not in ``broken``: tags whose
    contents have been found wrong, each with the reason. Raises CheckpointError where there is none.
    """
    folder = Path(folder)
    if _is_empty(folder):
        raise CheckpointError(f"--load {folder}: no checkpoint there; name a folder that holds one")
    try:
        return _read(folder, _latest_tag(folder), broken)
    except CheckpointError as error:
        problem = error
    whole, problems = _whole_and_broken(folder, broken)
    if not whole:
        raise CheckpointError(f"{problem}; no whole checkpoint is left in {folder}")
    if strict:
        raise CheckpointError(
            f"{problem}; the newest whole checkpoint is {whole[0].tag}: to use it, leave --load-strict out"
        )
    newer = [text for text in problems if text != str(problem)]
    return dataclasses.replace(whole[0], passed_over=(str(problem), *newer))


def tag_at(path: Path) -> SavedRun:
    """The checkpoint that is the folder ``path`` itself. Raises CheckpointError where it is not whole."""
    return _read(path.parent, path.name, _NONE_BROKEN)


def publish(folder: Path, tag: str, iteration: int) -> None:
    """Point both tracker files to ``tag``; each changes at one instant."""
    replace_text(folder / LATEST, tag)
    replace_text(folder / TRACKER, str(iteration))


def write_description(tag_folder: Path, description: dict[str, Any], records: Manifest | None = None) -> None:
    """Write ``run.json`` and the manifest, which says that all of the tag stands.

    ``records`` are of files written before; what they leave out is read once more.
    """
    own = write_text(tag_folder / RUN_FILE, json.dumps(description, indent=2) + "\n")
    write_manifest(tag_folder, {**(records or {}), RUN_FILE: own})


def describe(
    run: RunConfig, iteration: int, left_out: Sequence[range] = (), earlier: Sequence[Stretch] = ()
) -> dict[str, Any]:
    """What ``run.json`` says of a tag saved after ``iteration``, by a run that began with the ledger ``earlier``."""
    samples = run.train.consumed_samples(iteration)
    return {
        "iteration": iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * run.data.seq_length,
        "left_out_samples": [[span.start, span.stop] for span in left_out],
        "ledger": as_entries(lengthened(earlier, run, iteration)),
        "layout": layout_of(run),
        "settings": settings_of(run),
        "schedule": schedule_of(run),
        "has_optimizer": not run.checkpoint.no_save_optim,
        "has_rng": not run.checkpoint.no_save_rng,
        "config": dataclasses.asdict(run),
    }


def keep_ds_config(run: RunConfig, folder: Path) -> None:
    """Write the finished DeepSpeed config into ``folder``, where the run will save."""
    replace_text(folder / "ds_config.json", json.dumps(run.ds_config, indent=2) + "\n")


def _folder(config: CheckpointConfig) -> Path | None:
    """Where to look for a checkpoint; None where a fresh start is meant."""
    if config.auto_resume and not _is_empty(Path(config.save)):
        return Path(config.save)
    if config.load is None:
        return None
    folder = Path(config.load)
    is_also_save = config.save is not None and folder.resolve() == Path(config.save).resolve()
    may_be_empty = is_also_save or config.auto_resume
    return None if may_be_empty and _is_empty(folder) else folder


def _is_empty(folder: Path) -> bool:
    return not (folder / LATEST).exists() and not (folder / TRACKER).exists() and not _tags(folder)


def _tags(folder: Path) -> list[str]:
    """Whatever may be a checkpoint, whole or not."""
    names = {path.name for path in folder.glob("global_step*") if re.fullmatch(r"global_step\d+", path.name)}
    names |= {path.parent.name for path in folder.glob(f"*/{MANIFEST}")}
    return sorted(name for name in names if not name.endswith(UNFINISHED) and _TAG.fullmatch(name))


def _latest_tag(folder: Path) -> str:
    pointer = folder / LATEST
    try:
        tag = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{pointer} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{pointer} holds bytes that are no text") from None
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"{pointer} holds {tag[:40]!r}, which is no name of a checkpoint")
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{pointer} names {tag}, which is not in {folder}")
    return tag


def _read(folder: Path, tag: str, broken: Mapping[str, str]) -> SavedRun:
    """The tag, where it is whole. Raises CheckpointError with what it lacks."""
    if tag in broken:
        raise CheckpointError(broken[tag])
    place = folder / tag
    manifest = read_manifest(place)
    check_sizes(place, manifest)
    if RUN_FILE not in manifest:
        raise CheckpointError(f"{place} has no {RUN_FILE}: it is no checkpoint of a training run")
    check_content(place / RUN_FILE, manifest[RUN_FILE])
    try:
        description = json.loads((place / RUN_FILE).read_text(encoding="utf-8"))
        parts = description["layout"], description["config"]["model"]
        iteration = description["iteration"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{place / RUN_FILE} does not describe a training run") from None
    if not (all(isinstance(part, dict) for part in parts) and type(iteration) is int and iteration >= 0):
        raise CheckpointError(f"{place / RUN_FILE} does not describe a training run")
    return SavedRun(folder, tag, description)


def _whole_and_broken(folder: Path, broken: Mapping[str, str]) -> tuple[list[SavedRun], list[str]]:
    """The whole tags, newest first, and what is wrong with the others."""
    whole, problems = [], []
    for tag in _tags(folder):
        try:
            whole.append(_read(folder, tag, broken))
        except CheckpointError as error:
            problems.append(str(error))
    return sorted(whole, key=lambda saved: saved.iteration, reverse=True), problems


def whole_model_config(saved: SavedRun) -> ModelConfig:
    """The model that was saved, as it is built whole on one rank and in fp32."""
    try:
        config = ModelConfig(**saved.description["config"]["model"])
    except TypeError as error:
        raise CheckpointError(f"{saved.folder / saved.tag} was saved by another version: {error}") from None
    return replace(config, padded_vocab_size=config.vocab_size, dtype="fp32")
