"""The versions of torch that this suite supports. No torch here."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from megatron.common.errors import ConfigError

OLDEST_TORCH = "2.10"
NEWEST_TORCH = "2.15"
"""Both are tried with every release of this suite: tests/torch_versions.sh."""


def check_torch(*, is_main_rank: bool) -> None:
    """Raise ConfigError if torch is too old; on the main rank, warn if it is newer than what was tried."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return  # its import says so
    if _minor(installed) < _minor(OLDEST_TORCH):
        raise ConfigError(
            f"torch {installed} is installed, but {OLDEST_TORCH} to {NEWEST_TORCH} are supported: "
            "pip install -r requirements.txt"
        )
    if is_main_rank and _minor(installed) > _minor(NEWEST_TORCH):
        print(
            f"warning: torch {installed} is newer than {NEWEST_TORCH}, the newest that was tried with this suite",
            file=sys.stderr,
            flush=True,
        )


def _minor(text: str) -> tuple[int, ...]:
    """(2, 12) of 2.12.0a0+5228986c39.nv26.05."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
