"""Metrics of a run: a line on the screen, TensorBoard, and a file of JSON lines."""

import json
import math
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

from megatron.common.units import duration, with_prefix
from megatron.config import RunConfig
from megatron.engines.status import StepStatus
from megatron.model.architectures import architecture_of
from megatron.model.spec import hardware_flops
from megatron.training.callbacks import Callback, warn_if_unwritable

_QUIET_SECONDS = 5.0
"""After so long without a line there is one on a terminal."""
_COLUMNS = 160
"""A progress line that would be longer continues on the next one."""
_EVALUATED = 25
"""Batches of an evaluation between two lines elsewhere."""


class MetricsLogger:
    """Averages metrics over each log interval and logs them, on the main rank only."""

    def __init__(self, run: RunConfig, *, is_main_rank: bool, callbacks: Sequence[Callback] = ()):
        self._run = run
        self._callbacks = callbacks if is_main_rank else ()
        architecture = architecture_of(run.model)
        is_of_tokens = architecture.masked_lm is False or architecture.is_encoder_decoder
        self._loss_is_of_tokens = is_of_tokens and architecture.provider is None
        self._flops = hardware_flops(run) if architecture.provider is None else None
        self._is_main_rank = is_main_rank
        self._is_terminal = is_main_rank and sys.stdout.isatty()
        self._printed = time.monotonic()
        self._losses: list[Tensor] = []
        self._loss_parts: list[Mapping[str, Tensor]] = []
        self._samples = 0
        self._since = 0.0
        self._file: TextIO | None = None
        self._board: Any = None
        if is_main_rank and run.logging.metrics_file:
            with warn_if_unwritable(_FILE):
                Path(run.logging.metrics_file).parent.mkdir(parents=True, exist_ok=True)
                _end_last_line(Path(run.logging.metrics_file))
                self._file = open(run.logging.metrics_file, "a", encoding="utf-8", buffering=1)
        if is_main_rank and run.logging.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter  # slow, and most runs do not use it

            with warn_if_unwritable(_BOARD):
                self._board = SummaryWriter(run.logging.tensorboard_dir)

    def info(self, text: str) -> None:
        """Print ``text`` on the main rank."""
        self._printed = time.monotonic()
        if self._is_main_rank:
            print(text, flush=True)

    def text(self, name: str, text: str) -> None:
        """Add ``text`` to TensorBoard."""
        self._board = _kept(self._board, _BOARD, lambda board: board.add_text(name, f"```\n{text}\n```"))

    def add(self, iteration: int, loss: Tensor, status: StepStatus) -> None:
        """Add an iteration to the log interval."""
        self._losses.append(loss.detach())
        self._loss_parts.append(status.loss_parts)
        self._samples += self._run.train.batches.size(iteration)

    def has_line(self, iteration: int) -> bool:
        """Whether to call ``report`` for ``iteration``: it is logged, first after a resume, or a terminal was quiet."""
        if self._run.is_logged(iteration):
            return True
        is_first = 0 < iteration - self._run.train.resumed_after <= 5
        is_due = (is_first or self._is_quiet()) and self._run.logging.log_interval is None
        if is_due:
            self._printed = time.monotonic()  # on a GPU the line follows after the next iteration
        return is_due

    def means(self) -> dict[str, Tensor | float]:
        """The loss and its terms, [] each: means over the log interval so far; and the number of its iterations."""
        parts = self._loss_parts[-1]
        means = {name: _mean_of_finite([parts[name] for parts in self._loss_parts]) for name in parts}
        return {"lm_loss": _mean_of_finite(self._losses), **means, _AVERAGED: float(len(self._losses))}

    def counting(self, batches: int, what: str) -> Iterator[int]:
        """The numbers below ``batches``; between them, print now and then how many of ``what`` are done."""
        for number in range(batches):
            if number and (self._is_quiet() if self._is_terminal else number % _EVALUATED == 0):
                self.info(f"  {what}: {number} of {batches} batches")
            yield number

    def _is_quiet(self) -> bool:
        """Whether it is time for another line on a terminal; never elsewhere, where output is deterministic."""
        return self._is_terminal and time.monotonic() - self._printed >= _QUIET_SECONDS

    def evaluation(self, iteration: int, loss: float, split: str) -> None:
        """Log the loss of an evaluation on the split ``valid`` or ``test``."""
        kind = {"valid": "validation", "test": "test"}[split]
        text, values = f"  {kind} after iteration {iteration} | loss {loss:.4f}", {f"{kind}_loss": loss}
        if self._loss_is_of_tokens:
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
        _kept(self._file, _FILE, lambda file: file.close())
        _kept(self._board, _BOARD, lambda board: board.close())

    def report(self, iteration: int, status: StepStatus, measured: Mapping[str, Any]) -> None:
        """Log the iteration that ends an interval, and begin the next interval; of others only print the line.

        ``measured`` has the numbers of ``means()``, ``grad_norm``, and others by name.
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
        further_names = [*parts, *_norms_and_counts(further)]
        self.info(_progress_line(iteration, train.train_iters, averaged, shown, further_names))
        if self._run.is_logged(iteration):
            self._losses, self._loss_parts, self._samples, self._since = [], [], 0, time.monotonic()
            self.record(iteration, values)

    def record(self, iteration: int, values: dict[str, Any]) -> None:
        """Write ``values`` by name to the metrics file and TensorBoard."""
        # JSON has neither nan nor infinity.
        values = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
        for callback in self._callbacks:
            callback.on_metrics(iteration, values)
        line = json.dumps({"iteration": iteration, **values}) + "\n"
        self._file = _kept(self._file, _FILE, lambda file: file.write(line))

        def add_scalars(board: Any) -> None:
            for name, value in values.items():
                if value is not None:
                    board.add_scalar(name, value, iteration)

        self._board = _kept(self._board, _BOARD, add_scalars)


_FILE, _BOARD = "metrics", "TensorBoard's file"


def _kept(output: Any, what: str, write: Callable[[Any], Any]) -> Any:
    """``output`` after ``write``; None, from the first time on that it cannot be written: one warning is enough."""
    if output is not None:
        with warn_if_unwritable(what):
            write(output)
            return output
    return None


_AVERAGED = "averaged_iterations"
TIMER = "-time"
"""The end of the names of timers, as in Megatron-LM's TensorBoard files."""


def _end_last_line(path: Path) -> None:
    """End the last line of a metrics file, or remove what a process that was killed has written of it."""
    if not path.is_file():
        return
    with open(path, "rb+") as file:
        file.seek(max(path.stat().st_size - _LONGEST, 0))
        last = file.read().rpartition(b"\n")[2]
        if last.rstrip().endswith(b"}"):
            file.write(b"\n")
        elif last.startswith(b'{"iteration": '):
            file.truncate(path.stat().st_size - len(last))


_LONGEST = 1 << 20


def expert_load(layer: int, expert: int) -> str:
    """The name of the load of an expert, numbered from 0, in a transformer layer, numbered from 1."""
    return f"layer_{layer}/expert_{expert}_load"


def _norms_and_counts(values: Mapping[str, float]) -> list[str]:
    """The names of further values that belong into the progress line: all but timers and single experts."""
    return [name for name in values if not name.endswith(TIMER) and "/" not in name]


def _mean_of_finite(losses: list[Tensor]) -> Tensor:
    """The mean [] of those that are finite; nan if there is none."""
    values = torch.stack(losses).float()
    return values.where(values.isfinite(), torch.nan).nanmean()


def _progress_line(iteration: int, last: int, averaged: int, values: Mapping[str, Any], further: Sequence[str]) -> str:
    """The line of an iteration; losses, time and speed are means over the ``averaged`` iterations up to it."""
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
        if len(lines[-1]) + len(part) + 5 > _COLUMNS:
            lines[-1], part = f"{lines[-1]} |", f"  {part}"
            lines.append(part)
        else:
            lines[-1] += f" | {part}"
    return "\n".join(lines)


def _memory_gb() -> float:
    """Peak of this rank's device memory, or on CPU the present resident memory of the process, in 1e9 bytes."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.max_memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9
