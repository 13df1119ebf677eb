"""Import this first in a tool: ``python tools/x.py`` then finds the package without an install.

From then on a required package that is not installed is one line.
"""

import resource
import sys
from pathlib import Path

_LEAST = 1 << 26
"""Bytes of data that the libraries of a tool need; with fewer their import hangs, or aborts."""

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.common.packages import exit_without_package  # noqa: E402 (found by the line above)

sys.excepthook = exit_without_package
if 0 <= (allowed := resource.getrlimit(resource.RLIMIT_DATA)[0]) < _LEAST:
    print(
        f"{Path(sys.argv[0]).name}: error: the limit of bytes of data is {allowed:,}, and libraries need {_LEAST:,} or "
        "more: raise ulimit -d",
        file=sys.stderr,
    )
    sys.exit(7)
