"""Paths of rank files in a checkpoint, which have subfolders if there are thousands of ranks. No torch here.

With up to ``FLAT`` ranks all files are in the folder of the checkpoint, where DeepSpeed's own tools look for them. With
more ranks, files that exist for each rank are in subfolders of up to ``_BLOCK`` ranks:

    rng_state_01234.pt                           in rng_1/
    zero_pp_rank_1234_mp_rank_07_*_states.pt     in model_rank_07_1/, and so are files of experts
"""

import re
from pathlib import Path

from megatron.common.files import folder_mode

MANIFEST = "manifest.json"
"""Name of the file that marks a complete checkpoint."""
FLAT = 1024
_BLOCK = 1000
_RANK_FILE = re.compile(r"rng_state_(\d+)\.pt|\w+_rank_(\d+)_mp_rank_(\d+)_\w+\.pt")


def rank_file_path(file: Path, ranks: int) -> Path:
    """The path to write ``file``, given as if it had no subfolder, in a checkpoint of ``ranks`` ranks."""
    match = _RANK_FILE.fullmatch(file.name) if ranks > FLAT else None
    if match is None:
        return file
    kind = "rng" if match[3] is None else f"model_rank_{match[3]}"
    return file.parent / f"{kind}_{int(match[1] or match[2]) // _BLOCK}" / file.name


def make_subfolder(file: Path, folder: Path) -> None:
    """Create the subfolder of ``folder`` that contains ``file``, if it is in one; ``folder`` must exist."""
    if file.parent != folder:
        file.parent.mkdir(folder_mode(), exist_ok=True)


def existing_rank_file(file: Path) -> Path:
    """The path of an existing ``file``, given as if it had no subfolder, for any number of ranks."""
    in_folder = rank_file_path(file, FLAT + 1)
    return in_folder if in_folder.parent.is_dir() else file
