"""Metrics of a run: a line on the screen, TensorBoard, and a file of JSON lines."""

import json
import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.config import RunConfig
from megatron.model.architectures import architecture_of
from megatron.model.spec import hardware_flops
from megatron.training.callbacks import warn_if_unwritable
from megatron.training.engines import StepStatus


class MetricsLogger:
    """Averages metrics over each log interval and logs them, on the main rank alone."""

    def __init__(self, run: RunConfig, *, is_main_rank: bool):
        self._run = run
        architecture = architecture_of(run.model)
        self._loss_is_of_tokens = architecture.masked_lm is False and architecture.provider is None
        self._flops = hardware_flops(run) if architecture.provider is None else None
        self._is_main_rank = is_main_rank
        self._losses: list[Tensor] = []
        self._since = 0.0
        self._file: TextIO | None = None
        self._board: Any = None
        if is_main_rank and run.logging.metrics_file:
            Path(run.logging.metrics_file).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(run.logging.metrics_file, "a", encoding="utf-8", buffering=1)
        if is_main_rank and run.logging.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter  # slow, and most runs do not use it

            self._board = SummaryWriter(run.logging.tensorboard_dir)

    def info(self, text: str) -> None:
        """Print ``text`` on the main rank."""
        if self._is_main_rank:
            print(text, flush=True)

    def text(self, name: str, text: str) -> None:
        """Add ``text`` to TensorBoard."""
        if self._board:
            self._board.add_text(name, f"```\n{text}\n```")

    def step(self, iteration: int, loss: Tensor, learning_rate: float, status: StepStatus) -> None:
        """Add an iteration that ran at ``learning_rate``; log at the end of a log interval."""
        self._losses.append(loss.detach())
        if iteration % self._run.logging.log_interval == 0 or iteration == self._run.train.train_iters:
            self._report(iteration, learning_rate, status)

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

    def pause(self, seconds: float) -> None:
        """Exclude ``seconds`` from the time of training iterations."""
        self._since += seconds

    def close(self) -> None:
        """Flush and close the files."""
        with warn_if_unwritable("metrics"):
            for output in filter(None, (self._file, self._board)):
                output.close()

    def _report(self, iteration: int, learning_rate: float, status: StepStatus) -> None:
        losses = torch.stack(self._losses).float()
        loss = losses[losses.isfinite()].mean().item()  # nan if there is none
        seconds = (time.monotonic() - self._since) / len(self._losses)
        self._losses, self._since = [], time.monotonic()
        train, world = self._run.train, self._run.parallel.world_size
        samples = train.consumed_samples(iteration)
        tokens = train.global_batch_size * self._run.data.seq_length
        values = {
            "consumed_samples": samples,
            "consumed_tokens": samples * self._run.data.seq_length,
            "lm_loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": status.grad_norm,
            "loss_scale": status.loss_scale,
            "skipped_iterations": status.skipped_iterations,
            "seconds_per_iteration": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_per_device": None if self._flops is None else self._flops / seconds / world / 1e12,
            "memory_gb": _memory_gb(),
        }
        self.info(_progress_line(iteration, train.train_iters, values))
        self.record(iteration, values)

    def record(self, iteration: int, values: dict[str, Any]) -> None:
        """Write ``values`` by name to the metrics file and TensorBoard."""
        # JSON has neither nan nor infinity.
        values = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
        with warn_if_unwritable("metrics"):
            if self._file:
                self._file.write(json.dumps({"iteration": iteration, **values}) + "\n")
            for name, value in values.items() if self._board else ():
                if value is not None:
                    self._board.add_scalar(name, value, iteration)
            return
        self._file = self._board = None  # one warning is enough


def _progress_line(iteration: int, last: int, values: dict[str, Any]) -> str:
    parts = [
        f"iteration {iteration:{len(str(last))}}/{last}",
        f"loss {values['lm_loss']:.4f}",
        f"lr {values['learning_rate']:.3e}",
        f"grad norm {values['grad_norm']:.3f}" if values["grad_norm"] is not None else "grad norm -",
        f"loss scale {values['loss_scale']:g}",
        f"{values['seconds_per_iteration'] * 1000:.0f} ms",
        f"{values['tokens_per_second']:,.0f} tokens/s",
        *([] if values["tflops_per_device"] is None else [f"{values['tflops_per_device']:.3g} TFLOP/s"]),
        f"{values['memory_gb']:.2f} GB",
        f"ETA {timedelta(seconds=int((last - iteration) * values['seconds_per_iteration']))}",
    ]
    if values["skipped_iterations"]:
        parts.insert(5, f"skipped {values['skipped_iterations']}")
    return " | ".join(parts)


def _memory_gb() -> float:
    """Peak of this rank's device memory, or on CPU the present resident memory of the process, in 1e9 bytes."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.max_memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9
