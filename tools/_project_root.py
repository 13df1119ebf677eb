"""Import this first in a tool: ``python tools/x.py`` then finds the package without an install."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
