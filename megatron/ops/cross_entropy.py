"""The rank-local parts of cross entropy: statistics of each row of logits, and the gradient of the logits.

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
    """The cross entropy kernel: compiled on GPUs on which Triton works, regardless of ``--compile``."""
    is_compiled = compiles_loss(get_accelerator().device_name()) and _can_compile()
    return CompiledCrossEntropyKernel() if is_compiled else CrossEntropyKernel()


def _can_compile() -> bool:
    """Whether Triton, a C compiler and Python's headers are installed."""
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return find_spec("triton") is not None and headers.exists() and any(map(shutil.which, compilers))


class CrossEntropyKernel:
    """Cross entropy in plain torch, in chunks of rows, so that only a part of the logits is in fp32 at a time."""

    def statistics(self, logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype, from_largest: bool) -> Tensor:
        """logits [r, v/t], of which the first ``columns`` count, index [r] of the labels -> statistics [3, r], fp32.

        The statistics are the label's log-probability among these columns, a reference logit, and logsumexp minus that
        logit, computed in ``dtype``. The reference is the largest logit if ``from_largest``, which is more accurate,
        or else the label's logit, which is read anyway.
        """
        statistics = logits.new_empty((3, len(logits)), dtype=torch.float32)
        for rows in _chunks(logits, columns):
            unpadded = logits[rows, :columns].to(dtype)
            log_probabilities = unpadded.log_softmax(-1)
            labels = index[rows].unsqueeze(-1)
            statistics[0, rows] = log_probabilities.gather(-1, labels).squeeze(-1)
            if from_largest:
                statistics[1, rows], statistics[2, rows] = unpadded.amax(-1), -log_probabilities.amax(-1)
            else:
                statistics[1, rows], statistics[2, rows] = unpadded.gather(-1, labels).squeeze(-1), -statistics[0, rows]
            del unpadded, log_probabilities  # free the memory before the next chunk
        return statistics

    def gradient(
        self, logits: Tensor, logsumexp: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
    ) -> Tensor:
        """logits [r, v/t] -> gradient: ``scale`` [r] x softmax of ``columns``, plus ``at_label`` [r] at the labels."""
        gradient = torch.empty_like(logits)
        gradient[:, columns:] = 0
        for rows in _chunks(logits, columns):
            probabilities = logits[rows, :columns].to(scale.dtype).softmax(-1)
            at_label[rows] += probabilities.gather(-1, index[rows].unsqueeze(-1)).squeeze(-1) * scale[rows]
            torch.mul(probabilities, scale[rows].unsqueeze(-1), out=gradient[rows, :columns])
            del probabilities  # free the memory before the next chunk
        if columns:  # scatter_ on CPUs would convert the entire gradient to fp32 and back
            gradient[torch.arange(len(gradient), device=gradient.device), index] = at_label.to(gradient.dtype)
        return gradient


class CompiledCrossEntropyKernel(CrossEntropyKernel):
    """Cross entropy with one compiled kernel per pass over all rows, which converts logits as it reads them."""

    def statistics(self, logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype, from_largest: bool) -> Tensor:
        return _compiled(_statistics)(logits, index, columns)

    def gradient(
        self, logits: Tensor, logsumexp: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
    ) -> Tensor:
        return _compiled(_gradient)(logits, logsumexp, index, scale, at_label, columns)


def _statistics(logits: Tensor, index: Tensor, columns: int) -> Tensor:
    unpadded = logits[:, :columns].float()
    largest = unpadded.amax(-1)
    log_sum = (unpadded - largest.unsqueeze(-1)).exp().sum(-1).log()
    at_label = unpadded.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.stack([at_label - largest - log_sum, largest, log_sum])


def _gradient(
    logits: Tensor, logsumexp: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
) -> Tensor:
    column = torch.arange(logits.size(-1), device=logits.device)
    probabilities = (logits.to(scale.dtype) - logsumexp.unsqueeze(-1)).exp()
    at_column = torch.where(column == index.unsqueeze(-1), at_label.unsqueeze(-1), 0.0)
    gradient = probabilities * scale.unsqueeze(-1) + at_column
    return torch.where(column < columns, gradient, 0.0).to(logits.dtype)


_compiled = cache(torch.compile)


def _chunks(logits: Tensor, columns: int) -> Iterator[slice]:
    """Slices of the rows that are converted at a time; none if ``columns`` is 0."""
    if columns:
        step = rows_at_once(columns, logits.device.type)
        yield from (slice(start, start + step) for start in range(0, len(logits), step))
