"""pretrain_gpt2.py in fp16 on the CPU, which DeepSpeed and this project leave to GPUs, with overflows planted.

OVERFLOWS in the environment, such as ``4:1 5:1``: in iterations 4 and 5 of the program, counted from 1, the gradient is
infinite, on rank 1 alone.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt2
from megatron.cli.validation import RULES
from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2

ARCHITECTURE = GPT2
RULES[:] = [rule for rule in RULES if rule.name != "fp16, NCCL and apex need GPUs"]


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on the CPU, whose kernels torch has."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True


@contextmanager
def overflows_planted(overflows: Mapping[int, int]) -> Iterator[None]:
    """While inside, the gradient of each of these iterations is infinite on the given rank; the loss stays as it is."""
    import torch
    import torch.distributed as dist

    from megatron.model import loss
    from megatron.training import trainer

    iteration, train_batch, make_loss = 0, trainer.train_batch, loss.lm_loss

    def counted_train_batch(*arguments):
        nonlocal iteration
        iteration += 1
        return train_batch(*arguments)

    def loss_with_overflow(config, layout):
        loss_fn = make_loss(config, layout)

        def overflowing_loss(logits, targets):
            value = loss_fn(logits, targets)
            if value.requires_grad and overflows.get(iteration) == dist.get_rank():
                value.register_hook(lambda gradient: gradient * torch.inf)
            return value

        return overflowing_loss

    trainer.train_batch, loss.lm_loss = counted_train_batch, loss_with_overflow
    yield
    trainer.train_batch, loss.lm_loss = train_batch, make_loss


if __name__ == "__main__":
    allow_fp16()
    places = [place.split(":") for place in os.environ.get("OVERFLOWS", "").split()]
    with overflows_planted({int(iteration): int(rank) for iteration, rank in places}):
        run_rank(pretrain_gpt2.main)
