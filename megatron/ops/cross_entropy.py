"""The parts of the cross entropy that need no other rank: statistics of each row of logits, and their gradient.

v/t columns of a rank's logits, with padding, r rows: b x s
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.ops.choices import compiles_loss, rows_at_once


def cross_entropy_kernel() -> "CrossEntropyKernel":
    """Compiled on a GPU, also without ``--compile``, where Triton finds what it builds its launchers with."""
    is_compiled = compiles_loss(get_accelerator().device_name()) and _can_compile()
    return CompiledCrossEntropyKernel() if is_compiled else CrossEntropyKernel()


def _can_compile() -> bool:
    """Whether there are Triton, a C compiler and Python's headers."""
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return find_spec("triton") is not None and headers.exists() and any(map(shutil.which, compilers))


class CrossEntropyKernel:
    """In plain torch, some rows at a time, so that the logits are never all in fp32."""

    def statistics(self, logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype, from_largest: bool) -> Tensor:
        """logits [r, v/t], of which ``columns`` count, index [r] of the labels -> [3, r] in fp32.

        They are the label's log-probability among these columns, a logit, and by how much the logsumexp is larger,
        computed in ``dtype``. That logit is the largest, so that the rest is accurate, or the label's, which is read.
        """
        found = logits.new_empty((3, len(logits)), dtype=torch.float32)
        for rows in _chunks(logits, columns):
            counted = logits[rows, :columns].to(dtype)
            log_probabilities = counted.log_softmax(-1)
            at_label = index[rows].unsqueeze(-1)
            found[0, rows] = log_probabilities.gather(-1, at_label).squeeze(-1)
            if from_largest:
                found[1, rows], found[2, rows] = counted.amax(-1), -log_probabilities.amax(-1)
            else:
                found[1, rows], found[2, rows] = counted.gather(-1, at_label).squeeze(-1), -found[0, rows]
            del counted, log_probabilities  # before the next rows take as much
        return found

    def gradient(
        self, logits: Tensor, logsumexp: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
    ) -> Tensor:
        """logits [r, v/t] -> ``scale`` [r] x the softmax of those that count, plus ``at_label`` [r] at the label."""
        found = torch.empty_like(logits)
        found[:, columns:] = 0
        for rows in _chunks(logits, columns):
            probabilities = logits[rows, :columns].to(scale.dtype).softmax(-1)
            at_label[rows] += probabilities.gather(-1, index[rows].unsqueeze(-1)).squeeze(-1) * scale[rows]
            torch.mul(probabilities, scale[rows].unsqueeze(-1), out=found[rows, :columns])
            del probabilities  # before the next rows take as much
        if columns:  # torch's scatter_ on CPUs would convert all of it to fp32 and back
            found[torch.arange(len(found), device=found.device), index] = at_label.to(found.dtype)
        return found


class CompiledCrossEntropyKernel(CrossEntropyKernel):
    """One compiled kernel for each pass over all rows, which converts what it reads; accurate for any logits."""

    def statistics(self, logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype, from_largest: bool) -> Tensor:
        return _compiled(_statistics)(logits, index, columns)

    def gradient(
        self, logits: Tensor, logsumexp: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
    ) -> Tensor:
        return _compiled(_gradient)(logits, logsumexp, index, scale, at_label, columns)


def _statistics(logits: Tensor, index: Tensor, columns: int) -> Tensor:
    counted = logits[:, :columns].float()
    largest = counted.amax(-1)
    log_sum = (counted - largest.unsqueeze(-1)).exp().sum(-1).log()
    at_label = counted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.stack([at_label - largest - log_sum, largest, log_sum])


def _gradient(
    logits: Tensor, logsumexp: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
) -> Tensor:
    column = torch.arange(logits.size(-1), device=logits.device)
    probabilities = (logits.to(scale.dtype) - logsumexp.unsqueeze(-1)).exp()
    at_column = torch.where(column == index.unsqueeze(-1), at_label.unsqueeze(-1), 0.0)
    of_logits = probabilities * scale.unsqueeze(-1) + at_column
    return torch.where(column < columns, of_logits, 0.0).to(logits.dtype)


_compiled = cache(torch.compile)


def _chunks(logits: Tensor, columns: int) -> Iterator[slice]:
    """Slices of the rows that are converted together; none without columns."""
    if columns:
        step = rows_at_once(columns, logits.device.type)
        yield from (slice(start, start + step) for start in range(0, len(logits), step))
