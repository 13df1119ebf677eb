"""Pretrain GPT-2 with tensor, pipeline and data parallelism on DeepSpeed.

    deepspeed --num_gpus 4 pretrain_gpt2.py --model-parallel-size 2 --pipe-parallel-size 2 ...

Starts alike under deepspeed, torchrun, mpirun and plain python; --help lists every flag.
"""

from functools import partial

from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2
from megatron.training.main import train

ARCHITECTURE = GPT2
main = partial(train, ARCHITECTURE)

if __name__ == "__main__":
    run_rank(main)
