"""Pretrain T5 with tensor, pipeline and data parallelism on DeepSpeed.

    deepspeed --log_level critical --num_gpus 4 pretrain_t5.py --model-parallel-size 2 --pipe-parallel-size 2 ...

The model is T5 1.1. Its data are sentences: tools/preprocess_data.py --split-sentences. --help lists every flag. The
steps are those of pretrain_gpt2.py; the flags, the layers and the micro-batches follow from the architecture.
"""

import megatron.common.ctrl_c  # noqa: F401
import pretrain_gpt2
from megatron.launch.rank import run_rank
from megatron.model.architectures import T5

ARCHITECTURE = T5


def main() -> int | None:
    """Parse and check the command line, then train. Returns the exit code of the process."""
    return pretrain_gpt2.main(ARCHITECTURE)


if __name__ == "__main__":
    run_rank(main)
