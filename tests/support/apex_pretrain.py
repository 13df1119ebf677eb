"""pretrain_gpt2.py on a machine with apex: a package of its interface in plain torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import apex_stub

import pretrain_gpt2
from megatron.launch.rank import run_rank

if __name__ == "__main__":
    apex_stub.install()
    run_rank(pretrain_gpt2.main)
