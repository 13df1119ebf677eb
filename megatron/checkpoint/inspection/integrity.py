"""Whether the files of a tag are those that were saved. No torch here."""

from fnmatch import fnmatch
from pathlib import Path

from tqdm import tqdm

from megatron.checkpoint.manifest import MANIFEST, check_content, read_manifest
from megatron.checkpoint.tracker import SavedRun
from megatron.errors import CheckpointError


def verify_weights(saved: SavedRun) -> None:
    """Raise CheckpointError as ``verify`` does, for the files that the weights are read from."""
    verify(saved.folder / saved.tag, "*" if saved.description["layout"]["--zero-stage"] == 3 else "*model_states.pt")


def verify(tag_folder: Path, pattern: str = "*") -> str:
    """What comes of comparing the files that match ``pattern`` with the sizes and SHA-256 of the manifest, in words.

    Raises CheckpointError with a line for each file that is missing or another than the one that was saved.
    """
    manifest = {name: record for name, record in read_manifest(tag_folder).items() if fnmatch(name, pattern)}
    total = sum(record.size for record in manifest.values())
    problems: list[str] = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="checking", disable=None) as progress:
        for name, record in manifest.items():
            try:
                check_content(tag_folder / name, record)
            except CheckpointError as error:
                problems += error.messages
            progress.update(record.size)
    if problems:
        raise CheckpointError(problems)
    return f"yes: {len(manifest)} files, {total:,} bytes, as {MANIFEST} says"
