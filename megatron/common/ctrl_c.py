"""Imported first in a program, makes Ctrl-C during later imports end it at once, without a traceback.

If the program is only imported, as by a notebook or by pytest, Ctrl-C is not changed.
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
