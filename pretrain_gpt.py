"""Pretrain GPT: pretrain_gpt2.py under the name that Megatron-LM 2 and later give it."""

import megatron.common.ctrl_c  # noqa: F401
from megatron.launch.rank import run_rank
from megatron.tools.pretraining import ARCHITECTURE, main

__all__ = ["ARCHITECTURE", "main"]

if __name__ == "__main__":
    run_rank(main)
