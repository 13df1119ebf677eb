"""Pretrain GPT-2 with tensor, pipeline and data parallelism on DeepSpeed.

    deepspeed --log_level critical --num_gpus 4 pretrain_gpt2.py --model-parallel-size 2 --pipe-parallel-size 2 ...

Starts alike under deepspeed, torchrun, mpirun and plain python; --help lists every flag. What it does is in
megatron/tools/pretraining.py: main() parses, checks and starts, train() is what every rank runs.
"""

import megatron.common.ctrl_c  # noqa: F401
from megatron.launch.rank import run_rank
from megatron.tools.pretraining import ARCHITECTURE, main, pretrain, train

__all__ = ["ARCHITECTURE", "main", "pretrain", "train"]

if __name__ == "__main__":
    run_rank(main)
