"""Import this first in a tool: ``python tools/x.py`` then finds the package without an install.

From then on a required package that is not installed is one line, and Ctrl-C is none.
"""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.common.ctrl_c  # noqa: E402, F401 (found by the line above)
from megatron.common.packages import exit_without_package  # noqa: E402

LEAST_MEMORY = 1 << 28

sys.excepthook = exit_without_package
for limit, name, flag in ((resource.RLIMIT_AS, "address space", "-v"), (resource.RLIMIT_DATA, "data", "-d")):
    allowed, _ = resource.getrlimit(limit)
    if allowed != resource.RLIM_INFINITY and allowed < LEAST_MEMORY:  # imports would hang, abort, or fail halfway
        print(
            f"{Path(sys.argv[0]).name}: error: the limit of bytes of {name} is {allowed:,}, and libraries need "
            f"{LEAST_MEMORY:,} or more: raise ulimit {flag}",
            file=sys.stderr,
        )
        sys.exit(7)
