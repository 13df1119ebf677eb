"""An entry script like pretrain_gpt2.py, with the fault MUTATION of the environment where there are several ranks.

It trains the model of the script PROGRAM, by default of pretrain_gpt2.
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.launch.rank import run_rank  # noqa: E402

PROGRAM = importlib.import_module(os.environ.get("PROGRAM", "pretrain_gpt2"))
ARCHITECTURE = PROGRAM.ARCHITECTURE

if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) > 1 and "MUTATION" in os.environ:
        from benchmarks.mutations.table import MUTATIONS

        next(one for one in MUTATIONS if one.name == os.environ["MUTATION"]).apply()
    run_rank(PROGRAM.main)
