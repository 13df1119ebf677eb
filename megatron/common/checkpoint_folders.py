"""Where the files of ranks are in a checkpoint: beside the others, or of thousands of ranks in folders. No torch here.

Of up to ``FLAT`` ranks all files are in the folder of the checkpoint, where DeepSpeed's own tools look for them. Of
more ranks, files that there are for each rank are in folders of up to ``_BLOCK`` ranks:

    rng_state_01234.pt                           in rng_1/
    zero_pp_rank_1234_mp_rank_07_*_states.pt     in model_rank_07_1/, and so are files of experts
"""

import re
from pathlib import Path

from megatron.common.files import folder_mode

FLAT = 1024
_BLOCK = 1000
_OF_RANK = re.compile(r"rng_state_(\d+)\.pt|\w+_rank_(\d+)_mp_rank_(\d+)_\w+\.pt")


def placed(file: Path, ranks: int) -> Path:
    """Where ``file``, by its name in the folder of a checkpoint of so many ranks, has to be written."""
    found = _OF_RANK.fullmatch(file.name) if ranks > FLAT else None
    if found is None:
        return file
    kind = "rng" if found[3] is None else f"model_rank_{found[3]}"
    return file.parent / f"{kind}_{int(found[1] or found[2]) // _BLOCK}" / file.name


def make_subfolder(file: Path, folder: Path) -> None:
    """Create the folder of ``file``, which is in ``folder`` or in a folder there. Does not create ``folder``."""
    if file.parent != folder:
        file.parent.mkdir(folder_mode(), exist_ok=True)


def located(file: Path) -> Path:
    """Where it is, in a checkpoint of any number of ranks."""
    in_folder = placed(file, FLAT + 1)
    return in_folder if in_folder.parent.is_dir() else file
