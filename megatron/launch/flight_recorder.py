"""torch's flight recorder: the last collectives of a rank, written when it hangs, for ``torchfrtrace``.

The recorder is always on (TORCH_FR_BUFFER_SIZE, 2000 collectives). torch writes it when NCCL's timeout has passed, the
hang watchdog before that.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

from megatron.common.files import file_mode

PREFIX = "flight-recorder-rank"
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Where torch writes it, the number of the rank appended; the second is the older name."""


def record_into(environ: MutableMapping[str, str], folder: Path) -> None:
    """Have torch write into ``folder``, unless the user has named another place; before process groups are formed."""
    if not any(name in environ for name in _VARIABLES):
        environ[_VARIABLES[0]] = str(folder / PREFIX)


def recorded_file(environ: Mapping[str, str], rank: int) -> Path | None:
    """The file of ``rank``; None if there is none."""
    prefix = next((environ[name] for name in _VARIABLES if name in environ), None)
    file = Path(f"{prefix}{rank}")
    return file if prefix is not None and file.is_file() else None


def write_recorded(environ: Mapping[str, str], rank: int) -> None:
    """Write the last collectives of this rank in torch's own format. It waits for no device and no other rank.

    Raises OSError if the file cannot be written.
    """
    module = torch._C._distributed_c10d
    dump = getattr(module, "_dump_nccl_trace", None) if torch.distributed.get_backend() == "nccl" else None
    dump = dump or getattr(module, "_dump_fr_trace", None)
    prefix = next((environ[name] for name in _VARIABLES if name in environ), None)
    if dump is None or prefix is None:
        return
    file = Path(f"{prefix}{rank}")
    file.write_bytes(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False))
    file.chmod(file_mode())
