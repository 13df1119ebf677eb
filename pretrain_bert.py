"""Pretrain BERT with tensor, pipeline and data parallelism on DeepSpeed.

    deepspeed --num_gpus 4 pretrain_bert.py --model-parallel-size 2 --pipe-parallel-size 2 ...

Its data are sentences: tools/preprocess_data.py --split-sentences. --help lists every flag.
"""

from functools import partial

from megatron.launch.rank import run_rank
from megatron.model.architectures import BERT
from megatron.training.main import train

ARCHITECTURE = BERT
main = partial(train, ARCHITECTURE)

if __name__ == "__main__":
    run_rank(main)
