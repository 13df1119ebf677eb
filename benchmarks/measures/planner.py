"""How long tools/plan.py takes for every layout of 1,024 devices, start of Python included, where no torch can be had.

Held to a second; beside it, what importing torch alone would take.
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
    """Seconds of the search, by the clock and by the processor."""
    times = alternate({"search": lambda: _python(WITHOUT_TORCH), "torch": lambda: _python("import torch")}, rounds)
    search, second = times["search"], [1.0] * rounds
    return [
        Quantity(f"search: tools/plan.py {SEARCH}", "a second", search.wall, second, "s", most=1.0),
        Quantity("search, CPU time: the same", "a second", search.cpu, second, "s", most=1.0),
        Quantity("search, compared with an import: the same", "import torch", search.wall, times["torch"].wall, "s"),
    ]


def _python(program: str) -> None:
    words = [sys.executable, "-c", program, *(SEARCH.split() if program is WITHOUT_TORCH else [])]
    subprocess.run(words, cwd=ROOT, env=os.environ, check=True, stdout=subprocess.DEVNULL)
