"""Pretrain GPT-2 with tensor, pipeline and data parallelism on DeepSpeed.

    deepspeed --num_gpus 4 pretrain_gpt2.py --model-parallel-size 2 --pipe-parallel-size 2 ...

Starts alike under deepspeed, torchrun, mpirun and plain python; --help lists every flag.
"""

import os
import sys

from megatron.arguments import read_run, settled
from megatron.explain import explain
from megatron.launch.environment import prepare_environment
from megatron.launch.launcher import rank
from megatron.launch.rank import run_rank
from megatron.preflight import check


def main() -> int | None:
    """Everything that can be checked without torch comes before torch."""
    reading = read_run(sys.argv[1:], os.environ)
    if reading.run.logging.explain:
        return None if rank(os.environ) else explain(reading)
    run, _ = check(settled(reading))
    prepare_environment(os.environ)
    if run.logging.dry_run:
        os.environ["DS_ACCELERATOR"] = "cpu"  # which is there, whatever the run is for
        from megatron.dry_run import dry_run

        return None if rank(os.environ) else dry_run(run)

    from megatron.training import pretrain

    return pretrain(run)


if __name__ == "__main__":
    run_rank(main)
