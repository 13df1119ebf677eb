"""Import this first in a program: Ctrl-C during its other imports ends it at once, without a traceback.

Where the program is only imported, as by a notebook or by pytest, Ctrl-C is left as it is.
"""

import signal
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = getattr(sys.modules["__main__"], "__file__", None)

if (
    _PROGRAM is not None
    and Path(_PROGRAM).resolve().parent in (_ROOT, _ROOT / "tools", _ROOT / "tasks")
    and signal.getsignal(signal.SIGINT) == signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
