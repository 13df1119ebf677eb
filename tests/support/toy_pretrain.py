"""Pretrain the toy architecture."""

from functools import partial

from toy_spec import TOY

import pretrain_gpt2
from megatron.launch.rank import run_rank

ARCHITECTURE = TOY

if __name__ == "__main__":
    run_rank(partial(pretrain_gpt2.main, ARCHITECTURE))
