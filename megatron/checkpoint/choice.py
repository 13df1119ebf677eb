"""The checkpoint that all ranks go on from: chosen by the first, its files looked through by all."""

import torch.distributed as dist

from megatron.checkpoint.agreement import on_first, together
from megatron.checkpoint.files import check_harmless
from megatron.checkpoint.manifest import check_content, read_manifest
from megatron.checkpoint.tracker import SavedRun, resolve
from megatron.config import RunConfig
from megatron.errors import CheckpointError


def choose_checkpoint(run: RunConfig) -> SavedRun | None:
    """The newest checkpoint whose files are what was saved, the same on every rank; None for a fresh start.

    No tensor is read. Every rank must call it. Raises CheckpointError, on all ranks alike, where there is no
    such checkpoint, or where the first is broken and ``--load-strict`` was given.
    """
    broken: dict[str, str] = {}
    while (saved := on_first(lambda: resolve(run, broken))) is not None:
        problem = next((text for text in together(lambda: _problem(saved)) if text), None)
        if problem is None:
            break
        broken[saved.tag] = problem
    return saved


def _problem(saved: SavedRun) -> str | None:
    """What is wrong with this rank's share of the files: every n-th, the largest first."""
    place = saved.folder / saved.tag
    try:
        manifest = read_manifest(place)
        names = sorted(manifest, key=lambda name: (-manifest[name].size, name))
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            check_content(place / name, manifest[name])
            if name.endswith(".pt"):
                check_harmless(place / name)
    except CheckpointError as error:
        return str(error)
    return None
