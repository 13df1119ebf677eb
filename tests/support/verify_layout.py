"""tools/verify_layout.py with these arguments, whose ranks are forks of its own process, which has torch already.

For tests of what it finds. One test of it starts the tool itself, with the process that its ranks are forks of.
"""

import multiprocessing
import runpy
import sys

from megatron.tools.verify import results

results.rank_context = lambda device: multiprocessing.get_context("fork")
sys.argv[0] = "tools/verify_layout.py"
sys.path.insert(0, "tools")
runpy.run_path(sys.argv[0], run_name="__main__")
