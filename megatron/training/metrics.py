"""Logs the metrics of a run: progress lines, TensorBoard, and a JSON Lines file."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.common.files import append_only
from megatron.common.formats import COLUMNS, duration, with_prefix, wrapped
from megatron.config import RunConfig
from megatron.engines.status import StepStatus
from megatron.model.architectures import architecture_of
from megatron.model.spec import hardware_flops
from megatron.training.callbacks import Callback, warn_if_unwritable

_QUIET_SECONDS = 5.0
"""Seconds without output after which a terminal gets a progress line."""
_EVALUATED = 25
"""Batches between two progress lines of an evaluation, if the output is no terminal."""


class MetricsLogger:
    """Averages metrics over each log interval and logs them, on the main rank only."""

    def __init__(self, run: RunConfig, *, is_main_rank: bool, callbacks: Sequence[Callback] = ()):
        self._run = run
        self._callbacks = callbacks if is_main_rank else ()
        architecture = architecture_of(run.model)
        is_token_loss = architecture.masked_lm is False or architecture.is_encoder_decoder
        self._has_perplexity = is_token_loss and architecture.provider is None
        self._flops = hardware_flops(run) if architecture.provider is None else None
        self._is_main_rank = is_main_rank
        self._is_terminal = is_main_rank and sys.stdout.isatty()
        self._last_printed = time.monotonic()
        self._losses: list[Tensor] = []
        self._loss_parts: list[Mapping[str, Tensor]] = []
        self._samples = 0
        self._since = 0.0
        self._file: TextIO | None = None
        self._board: Any = None
        if is_main_rank and run.logging.metrics_file:
            with warn_if_unwritable(_FILE):
                Path(run.logging.metrics_file).parent.mkdir(parents=True, exist_ok=True)
                self._file = _open_metrics(run.logging.metrics_file)
        if is_main_rank and run.logging.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter  # slow, and most runs do not use it

            with warn_if_unwritable(_BOARD):
                self._board = SummaryWriter(run.logging.tensorboard_dir)

    def info(self, text: str) -> None:
        """Print ``text`` on the main rank."""
        self._last_printed = time.monotonic()
        if self._is_main_rank:
            print(wrapped(text), flush=True)

    def text(self, name: str, text: str) -> None:
        """Add ``text`` to TensorBoard."""
        self._board = _write_or_close(self._board, _BOARD, lambda board: board.add_text(name, f"```\n{text}\n```"))

    def add(self, iteration: int, loss: Tensor, status: StepStatus) -> None:
        """Add an iteration to the log interval."""
        self._losses.append(loss.detach())
        self._loss_parts.append(status.loss_parts)
        self._samples += self._run.train.batches.size(iteration)

    def has_line(self, iteration: int) -> bool:
        """Whether to call ``report`` for ``iteration``.

        It is logged, one of the first iterations, or a terminal has had no output for ``_QUIET_SECONDS``.
        """
        if self._run.is_logged(iteration):
            return True
        is_first = 0 < iteration - self._run.train.resumed_after <= 5
        is_due = (is_first or self._is_quiet()) and self._run.logging.log_interval is None
        if is_due:
            self._last_printed = time.monotonic()  # on a GPU the line is printed only after the next iteration
        return is_due

    def means(self) -> dict[str, Tensor | float]:
        """Means over the log interval so far of the loss and its terms, [] each, and its number of iterations."""
        parts = self._loss_parts[-1]
        means = {name: _mean_of_finite([parts[name] for parts in self._loss_parts]) for name in parts}
        return {"lm_loss": _mean_of_finite(self._losses), **means, _AVERAGED: float(len(self._losses))}

    def counting(self, batches: int, what: str) -> Iterator[int]:
        """``range(batches)`` with progress lines: ``what`` is the name of the work."""
        for number in range(batches):
            if number and (self._is_quiet() if self._is_terminal else number % _EVALUATED == 0):
                self.info(f"  {what}: {number} of {batches} batches")
            yield number

    def _is_quiet(self) -> bool:
        """Whether a terminal has had no output for ``_QUIET_SECONDS``; False in a log file, which is deterministic."""
        return self._is_terminal and time.monotonic() - self._last_printed >= _QUIET_SECONDS

    def evaluation(self, iteration: int, loss: float, split: str) -> None:
        """Log the loss, and for language models the perplexity, of an evaluation on the split ``valid`` or ``test``."""
        kind = {"valid": "validation", "test": "test"}[split]
        text, values = f"  {kind} after iteration {iteration} | loss {loss:.4f}", {f"{kind}_loss": loss}
        if self._has_perplexity:
            values[f"{kind}_ppl"] = math.exp(min(loss, 20.0))
            text += f" | perplexity {values[f'{kind}_ppl']:.3f}"
        self.info(text)
        self.record(iteration, values)

    def start(self) -> None:
        """Start the clock of the first log interval."""
        self._since = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the time of training iterations."""
        start = time.monotonic()
        yield
        self._since += time.monotonic() - start

    def close(self) -> None:
        """Flush and close the files."""
        _write_or_close(self._file, _FILE, lambda file: file.close())
        _write_or_close(self._board, _BOARD, lambda board: board.close())

    def report(self, iteration: int, status: StepStatus, measured: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Log the iteration that ends a log interval, or the run, and start the next one; for others only print it.

        ``measured`` has the values of ``means()``, ``grad_norm``, and the metrics of callbacks by name.
        """
        further = dict(measured)
        loss, grad_norm, averaged = further.pop("lm_loss"), further.pop("grad_norm"), int(further.pop(_AVERAGED))
        parts = {name: further.pop(name) for name in status.loss_parts}
        seconds = (time.monotonic() - self._since) / averaged
        mean_size = self._samples / len(self._losses)
        train, world = self._run.train, self._run.parallel.world_size
        samples = train.consumed_samples(iteration)
        flops_share = mean_size / train.global_batch_size
        values = {
            "consumed_samples": samples,
            "consumed_tokens": samples * self._run.data.seq_length,
            "lm_loss": loss,
            **parts,
            "learning_rate": status.learning_rate,
            "grad_norm": grad_norm if status.applied else None,
            "loss_scale": status.loss_scale,
            "skipped_iterations": status.skipped_iterations,
            "seconds_per_iteration": seconds,
            "tokens_per_second": mean_size * self._run.data.seq_length / seconds,
            "tflops_per_device": None if self._flops is None else flops_share * self._flops / seconds / world / 1e12,
            "memory_gb": _memory_gb(),
            **further,
        }
        if train.batches.varies:
            values["global_batch_size"] = train.batches.size(iteration)
        shown = {name: value for name, value in values.items() if name != "loss_scale" or self._run.precision.fp16}
        norms_and_counts = [name for name in further if not name.endswith(TIMER) and "/" not in name]  # no experts
        self.info(_progress_line(iteration, train.train_iters, averaged, shown, [*parts, *norms_and_counts]))
        if is_last or self._run.is_logged(iteration):
            self._losses, self._loss_parts, self._samples, self._since = [], [], 0, time.monotonic()
            self.record(iteration, values)

    def record(self, iteration: int, values: dict[str, Any]) -> None:
        """Write ``values`` by name to the metrics file and TensorBoard, and pass them to the callbacks."""
        # JSON has neither NaN nor infinity.
        values = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
        for callback in self._callbacks:
            callback.on_metrics(iteration, {**values})
        line = json.dumps({"iteration": iteration, **values}) + "\n"
        self._file = _write_or_close(self._file, _FILE, lambda file: file.write(line))

        def add_scalars(board: Any) -> None:
            for name, value in values.items():
                if value is not None:
                    board.add_scalar(name, value, iteration)

        self._board = _write_or_close(self._board, _BOARD, add_scalars)


_FILE, _BOARD = "metrics", "TensorBoard's file"


def _write_or_close(output: Any, what: str, write: Callable[[Any], Any]) -> Any:
    """Call ``write(output)``. Returns ``output``, or None after a failure, so that there is only one warning."""
    if output is not None:
        with warn_if_unwritable(what):
            write(output)
            return output
    return None


_AVERAGED = "averaged_iterations"
TIMER = "-time"
"""Suffix of the names of timers, as in Megatron-LM's TensorBoard files."""


def _open_metrics(name: str) -> TextIO:
    """Open a metrics file, or the target of a link, to append.

    Terminates its last line, or removes a partial line of a process that was killed.
    """

    def readable(path: str, flags: int) -> int:
        return append_only(path, flags & ~os.O_ACCMODE | os.O_RDWR)

    file = open(os.path.realpath(name), "a", encoding="utf-8", buffering=1, opener=readable)
    if size := os.fstat(file.fileno()).st_size:
        last = os.pread(file.fileno(), _LONGEST, max(size - _LONGEST, 0)).rpartition(b"\n")[2]
        if last.rstrip().endswith(b"}"):
            file.write("\n")
        elif last.startswith(b'{"iteration": '):
            os.ftruncate(file.fileno(), size - len(last))
    return file


_LONGEST = 1 << 20


def expert_load(layer: int, expert: int) -> str:
    """The metric name of the load of an expert, numbered from 0, in a transformer layer, numbered from 1."""
    return f"layer_{layer}/expert_{expert}_load"


def _mean_of_finite(losses: list[Tensor]) -> Tensor:
    """The mean [] of the finite losses; NaN if there are none."""
    values = torch.stack(losses).float()
    return values.where(values.isfinite(), torch.nan).nanmean()


def _progress_line(iteration: int, last: int, averaged: int, values: Mapping[str, Any], further: Sequence[str]) -> str:
    """The progress line of an iteration; losses, time and speed are means over the last ``averaged`` iterations."""
    parts = [
        f"iteration {iteration:{len(str(last))}}/{last}",
        f"loss {values['lm_loss']:.4f}" + (f" (mean of {averaged})" if averaged > 1 else ""),
        f"lr {values['learning_rate']:.3e}",
        f"grad norm {values['grad_norm']:.3f}" if values["grad_norm"] is not None else "grad norm -",
        *([f"loss scale {values['loss_scale']:g}"] if "loss_scale" in values else []),
        *([f"skipped {values['skipped_iterations']}"] if values["skipped_iterations"] else []),
        *(f"{name.replace('_', ' ')} {values[name]:.6g}" for name in further),
        f"step {duration(values['seconds_per_iteration'])}",
        f"{values['tokens_per_second']:,.0f} tokens/s",
        *([] if (speed := values["tflops_per_device"]) is None else [with_prefix(speed * 1e12, "FLOP/s")]),
        f"memory {with_prefix(values['memory_gb'] * 1e9, 'B')}",
        f"ETA {timedelta(seconds=int((last - iteration) * values['seconds_per_iteration']))}",
    ]
    if "global_batch_size" in values:
        parts.insert(1, f"batch {values['global_batch_size']}")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 5 > COLUMNS:
            lines[-1], part = f"{lines[-1]} |", f"  {part}"
            lines.append(part)
        else:
            lines[-1] += f" | {part}"
    return "\n".join(lines)


def _memory_gb() -> float:
    """Peak of this rank's device memory, or on CPU the current resident memory of the process, in 1e9 bytes."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.max_memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9
