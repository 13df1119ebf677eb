"""Train a vision-language model (LLaVA) with tensor, pipeline and data parallelism on DeepSpeed.

    deepspeed --log_level critical --num_gpus 4 pretrain_vlm.py --model-parallel-size 2 --pipe-parallel-size 2 ...

Its data are conversations with images. --help lists every flag. The steps are those of pretrain_gpt2.py; the flags, the
layers and the micro-batches follow from the architecture.
"""

import megatron.common.ctrl_c  # noqa: F401
import pretrain_gpt2
from megatron.launch.rank import run_rank
from megatron.model.architectures import LLAVA

ARCHITECTURE = LLAVA


def main() -> int | None:
    """Parse and check the command line, then train. Returns the exit code of the process."""
    return pretrain_gpt2.main(ARCHITECTURE)


if __name__ == "__main__":
    run_rank(main)
