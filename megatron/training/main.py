"""What a program that trains a model does."""

import os
import sys

from megatron.config.command_line import read_run
from megatron.config.environment import rank
from megatron.launch.environment import prepare_environment
from megatron.model.spec import ArchitectureSpec
from megatron.tools.planning.explain import explain
from megatron.training.preflight import check


def train(architecture: ArchitectureSpec) -> int | None:
    """Parse, check, train. Everything that can be checked without torch comes before torch."""
    reading = read_run(sys.argv[1:], os.environ, architecture)
    if reading.run.logging.explain:
        return None if rank(os.environ) else explain(reading)
    run, _ = check(reading.checked())
    prepare_environment(os.environ)
    if run.logging.dry_run:
        os.environ["DS_ACCELERATOR"] = "cpu"  # which is there, whatever the run is for
        from megatron.tools.planning.dry_run import dry_run

        return None if rank(os.environ) else dry_run(run)

    from megatron.training.trainer import pretrain

    return pretrain(run)
