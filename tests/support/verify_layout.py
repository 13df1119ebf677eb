"""tools/verify_layout.py, or a module in place of it, whose ranks are forks of its own process, which has torch.

    python tests/support/verify_layout.py [-m MODULE] ARGUMENTS

For tests of what it finds. One test of it starts the tool itself, with the process that its ranks are forks of.
"""

import multiprocessing
import runpy
import sys

from megatron.tools.verify import runs

runs.rank_context = lambda device: multiprocessing.get_context("fork")
sys.path[:0] = [".", "tools"]
if sys.argv[1:2] == ["-m"]:
    _, _, name, *words = sys.argv
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__")
else:
    sys.argv[0] = "tools/verify_layout.py"
    runpy.run_path(sys.argv[0], run_name="__main__")
