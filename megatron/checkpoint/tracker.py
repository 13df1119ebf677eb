"""Which checkpoint a folder offers, found without torch and before anything starts.

SAVE/latest                               name of the newest tag, read by DeepSpeed
SAVE/latest_checkpointed_iteration.txt    its iteration, read by Megatron
SAVE/global_stepN/run.json                what was saved; written last, so it marks a whole tag
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import RunConfig
from megatron.errors import CheckpointError
from megatron.partition import layers_of_pieces

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

    @property
    def left_out(self) -> tuple[range, ...]:
        """Samples of the stream that training goes past, in order."""
        return tuple(range(start, stop) for start, stop in self.description.get("left_out_samples", ()))


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
    _check_fit(saved, run)
    return saved


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is anything to load in ``folder``."""
    return not _is_empty(folder)


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


def describe(run: RunConfig, iteration: int, left_out: Sequence[range] = ()) -> dict[str, Any]:
    """What ``run.json`` says of a tag saved after ``iteration``."""
    samples = iteration * run.train.global_batch_size
    return {
        "iteration": iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * run.data.seq_length,
        "left_out_samples": [[span.start, span.stop] for span in left_out],
        "layout": _layout(run),
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


_SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)


def _layout(run: RunConfig) -> dict[str, Any]:
    return {
        "--model-parallel-size": run.parallel.model_parallel_size,
        "--pipe-parallel-size": run.parallel.pipe_parallel_size,
        "--ds-sequence-parallel-size": run.parallel.ds_sequence_parallel_size,
        "data-parallel size": run.parallel.data_parallel_size,
        "--zero-stage": run.zero.zero_stage,
        "precision": run.precision.dtype,
        **_stages(run),
    }


def _stages(run: RunConfig) -> dict[str, Any]:
    """How the layers lie on pipeline stages: the files of a stage's optimizer hold what that stage holds."""
    if not run.parallel.uses_pipeline:
        return {}
    layers = ", ".join(map(str, layers_of_pieces(run)))
    return {"--pipeline-schedule": run.parallel.pipeline_schedule, "the partition into stages": layers}


def _check_fit(saved: SavedRun, run: RunConfig) -> None:
    """The same model on the same layout, and the state that the flags ask for."""
    config, place = run.checkpoint, saved.folder / saved.tag
    model = saved.description["config"]["model"]
    shape = {_flag(name): getattr(run.model, name) for name in _SHAPE_FIELDS}
    saved_shape = {_flag(name): model.get(name) for name in _SHAPE_FIELDS}
    messages = _differences(shape, saved_shape, place, "load a model of the same shape")
    layout = _layout(run)
    if (config.finetune or config.no_load_optim) and run.zero.zero_stage < 3:
        # Weights alone are cut by tensor and pipeline parallelism only; ZeRO-3 cuts them once more.
        layout = {name: layout[name] for name in ("--model-parallel-size", "--pipe-parallel-size")}
    messages += _differences(layout, saved.description["layout"], place, "resume on the layout it was saved on")
    if not (config.finetune or config.no_load_optim or saved.description.get("has_optimizer")):
        messages.append(f"{place} was saved with --no-save-optim: add --no-load-optim or --finetune")
    if not (config.finetune or config.no_load_rng or saved.description.get("has_rng")):
        messages.append(f"{place} was saved with --no-save-rng: add --no-load-rng or --finetune")
    if messages:
        raise CheckpointError(messages)


def _flag(field: str) -> str:
    return "the vocabulary's size" if field == "vocab_size" else "--" + field.replace("_", "-")


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], place: Path, remedy: str) -> list[str]:
    return [
        f"{name} is {value}, but {theirs[name]} in {place}: {remedy}"
        for name, value in ours.items()
        # One engine has names that the other has not; that it is another shows in those they share.
        if theirs.get(name, value) != value
    ]


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
