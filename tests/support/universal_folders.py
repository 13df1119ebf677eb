"""The content of universal checkpoints."""

from pathlib import Path
from typing import Any

from megatron.checkpoint.tensor_files import read_file


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """The state of the parameter ``name`` in the universal checkpoint ``folder``."""
    contents = {file.stem: read_file(file) for file in sorted((folder / "zero" / name).glob("*.pt"))}
    return {key: value["param"] if isinstance(value, dict) else value for key, value in contents.items()}
