"""Import this first in a tool: ``python tools/x.py`` then finds the package without an install.

From then on a required package that is not installed is one line, and Ctrl-C is none.
"""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.common.ctrl_c  # noqa: E402, F401 (found by the line above)
from megatron.common.packages import exit_without_package  # noqa: E402
from megatron.launch.host_limits import LEAST_DATA  # noqa: E402

sys.excepthook = exit_without_package
if 0 <= (allowed := resource.getrlimit(resource.RLIMIT_DATA)[0]) < LEAST_DATA:  # imports would hang, or abort
    print(
        f"{Path(sys.argv[0]).name}: error: the limit of bytes of data is {allowed:,}, and libraries need "
        f"{LEAST_DATA:,} or more: raise ulimit -d",
        file=sys.stderr,
    )
    sys.exit(7)
