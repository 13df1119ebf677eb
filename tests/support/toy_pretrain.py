"""Pretrain the toy architecture."""

from functools import partial

from toy_spec import TOY

from megatron.launch.rank import run_rank
from megatron.training.main import train

ARCHITECTURE = TOY

if __name__ == "__main__":
    run_rank(partial(train, ARCHITECTURE))
