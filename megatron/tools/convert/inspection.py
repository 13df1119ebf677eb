"""The format of a checkpoint, and what is known of it without reading its weights. No torch here."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import safetensors

from megatron.checkpoint.files import MANIFEST, check_content, read_manifest
from megatron.checkpoint.run_file import RUN_FILE, SavedRun
from megatron.checkpoint.safetensors_files import INDEX_SUFFIX, SAFETENSORS, broken, shards_of
from megatron.checkpoint.tracker import LATEST, TRACKER, newest, tag_at
from megatron.common.errors import CheckpointError, counted
from megatron.config import ModelConfig
from megatron.model.architectures import GPT2, T5, architecture_of
from megatron.model.huggingface import HF_CONFIG
from megatron.model.huggingface import read_config as read_folder_config
from megatron.model.spec import ArchitectureSpec
from megatron.tools.command_line import progress_bar
from megatron.training.summary import layer_kinds


@dataclass(frozen=True)
class Found:
    """A path, and its format."""

    path: Path
    kind: str
    """A name in ``KINDS``."""
    saved: SavedRun | None = None
    """The checkpoint of this suite that it is, or points to."""

    @property
    def what(self) -> str:
        """The kind for messages."""
        return KINDS[self.kind].words

    @property
    def description(self) -> Mapping[str, Any] | None:
        """The content of ``run.json``, if there is one; merged weights have it in their own file."""
        return self.saved.description if self.saved else None


@dataclass(frozen=True)
class Kind:
    """A format of checkpoints: how it is recognized, and its name for messages."""

    words: str
    matches: Callable[[Path], bool]
    saved: Callable[[Path], SavedRun | None] = lambda path: None


def _is_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors" and path.is_file() or _has(SAFETENSORS, SAFETENSORS + INDEX_SUFFIX)(path)


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: any((path / name).exists() for name in names)


def _is_folder(path: Path) -> bool:
    return _has(LATEST, TRACKER)(path) or path.is_dir() and any(path.glob(f"*/{RUN_FILE}"))


def _source(path: Path) -> SavedRun | None:
    """The tag next to a universal checkpoint, whose ``run.json`` describes both."""
    tag = path.with_name(path.name.removesuffix("_universal"))
    return next((tag_at(folder) for folder in (path, tag) if (folder / RUN_FILE).exists()), None)


KINDS = {
    "universal": Kind("a universal checkpoint", _has("zero"), _source),
    "tag": Kind("one checkpoint", _has(RUN_FILE), tag_at),
    "folder": Kind("a folder of checkpoints", _is_folder, newest),
    "huggingface": Kind("a Hugging Face folder", _has(HF_CONFIG)),
    "safetensors": Kind("weights in one piece (safetensors)", _is_safetensors),
}
"""In the order in which they are matched."""


def find(path: Path) -> Found:
    """The format of ``path``.

    Raises CheckpointError if it has none of the known formats, or is an incomplete checkpoint of this suite.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; name a checkpoint")
    path = path.resolve() if path.name in ("", "..") else path  # a tag is known by its name
    for name, kind in KINDS.items():
        if kind.matches(path):
            return Found(path, name, kind.saved(path))
    if path.is_dir() and any(path.glob("*_model_states.pt")):
        tag_at(path)  # raises with what is missing
    raise CheckpointError(
        f"{path} is not a checkpoint: it has neither {LATEST} nor {RUN_FILE}, {HF_CONFIG}, {SAFETENSORS} or zero/"
    )


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file, or of the first of several."""
    if path.is_dir():
        file = path / SAFETENSORS
        path = file if file.exists() else shards_of(path / (SAFETENSORS + INDEX_SUFFIX))[0]
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise broken(path, error) from None


def verify_weights(saved: SavedRun) -> None:
    """Compare the files with weights with the manifest. Raises as ``verify``."""
    verify(saved.path, "*" if saved.layout.zero_stage == 3 else "*model_states.pt")


def verify(tag_folder: Path, pattern: str = "*") -> str:
    """Compare the files that match ``pattern`` with the sizes and hashes in the manifest. Returns a summary.

    Raises CheckpointError with a line for each file that is missing or damaged.
    """
    manifest = {name: record for name, record in read_manifest(tag_folder).items() if fnmatch(name, pattern)}
    total = sum(record.size for record in manifest.values())
    problems: list[str] = []
    with progress_bar(total=total, unit="B", unit_scale=True, desc="checking") as progress:
        for name, record in manifest.items():
            try:
                check_content(tag_folder / name, record)
            except CheckpointError as error:
                problems += error.messages
            progress.update(record.size)
    if problems:
        raise CheckpointError(problems)
    return f"yes: {counted(len(manifest), 'file')}, {total:,} bytes, as {MANIFEST} says"


_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "ffn_hidden_size": "inside the MLP",
    "max_position_embeddings": "positions",
    "vocab_size": "tokens",
}
_GENERATE, _CONVERT = "tools/generate.py", "tools/convert_checkpoint.py"
_LOADERS = {
    "folder": (_GENERATE, f"{_CONVERT} merge, to-hf"),
    "tag": (_GENERATE, f"{_CONVERT} merge, to-hf"),
    "universal": ("DeepSpeed with load_universal", _GENERATE, f"{_CONVERT} merge, to-hf"),
    "safetensors": ("safetensors.torch.load_file", _GENERATE, f"{_CONVERT} to-hf"),
    "huggingface": ("transformers.{auto_class}", _GENERATE, f"{_CONVERT} from-hf"),
}
"""Programs that load each kind of checkpoint, besides the training program."""


def facts(found: Found, description: Mapping[str, Any] | None, config: ModelConfig | None) -> dict[str, Any]:
    """The facts about a checkpoint in ``run.json``, or in the header of merged weights."""
    known: dict[str, Any] = {"path": str(found.path), "kind": found.what}
    if found.kind == "folder" and found.saved:
        known["newest"] = found.saved.tag
        known["tags"] = sorted(file.parent.name for file in found.path.glob(f"*/{RUN_FILE}"))
    if description is not None:
        known |= {name: description.get(name) for name in ("iteration", "consumed_samples", "consumed_tokens")}
        known["layout"] = description["layout"]
        known["holds"] = _holds(found, description)
    if config is not None:
        known["model"] = {words: getattr(config, name) for name, words in _SIZES.items()}
        if config.query_groups != config.num_attention_heads:
            known["model"]["query groups"] = config.query_groups
        if config.head_size * config.num_attention_heads != config.hidden_size:
            known["model"]["head size"] = config.head_size
        if kinds := layer_kinds(config):
            known["kinds"] = kinds
    architecture = GPT2 if config is None else architecture_of(config)
    return known | {"loaded_by": loaders(found, description, architecture)}


def integrity(found: Found) -> str:
    """A line on whether the files are undamaged. Raises CheckpointError if they are not."""
    if found.saved and found.kind != "universal":
        return verify(found.saved.path)
    return "no manifest: what was saved is not known"


def loaders(found: Found, description: Mapping[str, Any] | None, architecture: ArchitectureSpec) -> list[str]:
    """The programs that load it, and how."""
    classes = {GPT2.name: "AutoModelForCausalLM", T5.name: "AutoModelForSeq2SeqLM"}
    generates = architecture.name in classes
    auto_class = classes.get(architecture.name, "AutoModelForPreTraining")
    others = [
        program.format(auto_class=auto_class) for program in _LOADERS[found.kind] if generates or program != _GENERATE
    ]
    if found.kind == "huggingface":
        others.insert(0, f"{architecture.program} --load-hf")
    if description is None or found.kind not in ("folder", "tag"):
        return others
    how = "to resume" if description.get("has_optimizer") else "with --finetune, for it has no optimizer"
    via = "" if found.kind == "folder" else f", where {found.path.parent / 'latest'} names it"
    return [f"{architecture.program} --load {how}{via}", *others]


def _holds(found: Found, description: Mapping[str, Any]) -> list[str]:
    if found.kind == "safetensors":
        return ["weights"]
    has_rng = description.get("has_rng") and found.kind != "universal"
    state = {"the optimizer": description.get("has_optimizer"), "random streams": has_rng}
    return ["weights", *(name for name, is_there in state.items() if is_there)]


RUN_KEY = "run"
"""The key of ``run.json`` in the header of merged weights."""


def read_config(found: Found, *, vocab_size: int | None = None) -> ModelConfig | None:
    """The configuration of the model, if known. ``vocab_size`` is that of a Hugging Face folder's tokenizer."""
    if found.kind == "huggingface":
        return read_folder_config(found.path, vocab_size=vocab_size)
    description = read_description(found)
    if description is None:
        return None
    config = SavedRun(found.path.parent, found.path.name, description).whole_model_config()
    if description["config"]["data"].get("sft"):  # the data told documents apart; in a prompt nothing does
        return replace(config, reset_attention_mask=False, reset_position_ids=False)
    return config


def read_description(found: Found) -> Mapping[str, Any] | None:
    """The ``run.json`` of the training run, if this suite trained it."""
    return _kept_description(found.path) if found.kind == "safetensors" else found.description


def _kept_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(read_metadata(path)[RUN_KEY])
        {**description["config"]["model"], **description["layout"]}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path} does not describe its model; files of merge do, and from-hf reads a folder with config.json"
        ) from None
    return description
