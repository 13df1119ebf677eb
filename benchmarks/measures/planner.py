"""How long tools/plan.py takes for every layout of 1,024 devices, start of Python included, where no torch can be had.

Compared with what importing torch takes.
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.comparing import Quantity, alternate

ROOT = Path(__file__).parents[2]
SEARCH = "--model 175b --device a100 --devices 1024 --global-batch-size 1536"
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = sys.modules['deepspeed'] = None; sys.path.insert(0, 'tools');"
    " sys.argv[0] = 'tools/plan.py'; runpy.run_path('tools/plan.py', {}, '__main__')"
)


def measure(rounds: int) -> list[Quantity]:
    """Seconds of the search."""
    times = alternate({"search": lambda: _python(WITHOUT_TORCH), "torch": lambda: _python("import torch")}, rounds)
    peer = "import torch"
    return [Quantity(f"search: tools/plan.py {SEARCH}", peer, times["search"].wall, times["torch"].wall, "s")]


def _python(program: str) -> None:
    words = [sys.executable, "-c", program, *(SEARCH.split() if program is WITHOUT_TORCH else [])]
    subprocess.run(words, cwd=ROOT, env=os.environ, check=True, stdout=subprocess.DEVNULL)
