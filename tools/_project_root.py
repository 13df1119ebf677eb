"""Import this first in a tool: ``python tools/x.py`` then finds the package without an install.

From then on a required package that is not installed is one line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.common.packages import exit_without_package  # noqa: E402 (found by the line above)

sys.excepthook = exit_without_package
