"""The training loop: train, evaluate, save checkpoints, handle bad steps, and exit early."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.load import load_checkpoint, select_checkpoint
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.snapshots import Snapshots
from megatron.common.errors import NumericsError
from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.engine import Engine, eval_batch, step_status, train_batch
from megatron.engines.status import HostCopy, StepStatus
from megatron.launch.progress import ProgressState
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import InstructionHook
from megatron.training.anomaly_detection import AnomalyDetector, StepResult, find_origin, max_across_ranks
from megatron.training.callbacks import Callback
from megatron.training.data_iterators import DataIterators
from megatron.training.exit_conditions import ExitConditions, due
from megatron.training.metrics import MetricsLogger


class Step(NamedTuple):
    """An iteration that the host has launched, and a GPU may still be running."""

    iteration: int
    status: StepStatus
    numbers: HostCopy
    """By name: the maxima over all ranks (``AGREED``), and the values to log."""


REQUEST = ("signal", "is late")
AGREED = ("largest loss", "checkpoint", *REQUEST)
"""Names of values reduced to their maximum over all ranks; "checkpoint" is ``Checkpointer.state``."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The training loop over an engine. Every rank must call every method."""

    run: RunConfig
    layout: ParallelLayout
    engine: Engine
    data: DataIterators
    checkpointer: Checkpointer
    log: MetricsLogger
    exit_conditions: ExitConditions
    progress: ProgressState
    callbacks: Sequence[Callback] = ()
    snapshots: Snapshots | None = None

    def __post_init__(self) -> None:
        self.anomalies = AnomalyDetector(self.run)
        self.hooks: list[InstructionHook] = (
            [] if self.run.logging.watchdog_minutes is None else [self.progress.instruct]
        )
        self.rewinds: Counter[str] = Counter()
        """Number of rewinds to each checkpoint."""
        self.steps: deque[Step] = deque()
        """Iterations that are not yet logged and checked: on a GPU the last one, so that the host need not wait."""

    def train(self, finished: int) -> int:
        """Train from the iteration after ``finished`` to the last, then evaluate on the test split.

        With ``--skip-train`` only evaluate, on the validation and the test split.

        Returns the exit code of the process: 0, or the exit code of an exit condition. Raises NumericsError if too
        many consecutive iterations are bad, or the last one, so that the run ends without its checkpoint.
        """
        for line in self.data.describe():
            self.log.info(line)
        is_skipped = self.run.train.skip_train
        iteration, early_exit = (finished, None) if is_skipped else self._train_until_exit(finished)
        if early_exit is None:
            if is_skipped or not self.evaluates_after(iteration):
                self.evaluate(iteration)
            self.evaluate(iteration, split="test")
        for callback in self.callbacks:
            callback.on_run_end()
        self.log.close()
        if self.run.checkpoint.save and not early_exit and not self.anomalies.weights_are_good:
            raise NumericsError(
                f"iteration {iteration}: the last step was bad, so no checkpoint was saved after it: lower --lr, check "
                "the data, or go on to other samples with a larger --train-iters"
            )
        return self.exit_conditions.exit_code

    def evaluates_after(self, iteration: int) -> bool:
        """Whether the model is evaluated after ``iteration``."""
        return due(iteration, self.run.train.eval_interval)

    def saves_after(self, iteration: int) -> bool:
        """Whether a checkpoint is saved after ``iteration``."""
        return due(iteration, self.run.checkpoint.save_interval)

    def takes_snapshot_after(self, iteration: int) -> bool:
        """Whether a snapshot is taken after ``iteration``: not if a checkpoint is on disk by then."""
        config = self.run.checkpoint
        is_saved = iteration == self.run.train.train_iters or (self.saves_after(iteration) and not config.async_save)
        return due(iteration, config.snapshot_interval) and not is_saved

    def evaluate(self, iteration: int, split: str = "valid") -> None:
        """Log the mean loss over the next ``--eval-iters`` global batches of ``split``, unless the run is to exit."""
        config = self.run.train
        if not config.eval_iters or not self.data.has(split) or self.exit_conditions.exit_code:
            return
        self.progress.enter("evaluation", iteration)
        self.engine.set_train_batch_size(config.global_batch_size * self.run.parallel.samples_counted)
        with self.log.paused():
            earlier = max(iteration - 1, 0) // config.eval_interval if split == "valid" else 0
            batches = self.data.evaluation(split, earlier)
            what = f"evaluating on the {split} split after iteration {iteration}"
            losses, requests = list[Tensor](), deque[HostCopy]()
            for number in self.log.counting(config.eval_iters, what):
                losses.append(eval_batch(self.engine, batches, self.hooks))
                if reason := self._reason_to_stop(losses[-1], requests):
                    self.log.info(f"  {what}: stopped after {number + 1} of {config.eval_iters} batches: {reason}")
                    return
            self.log.evaluation(iteration, torch.stack(losses).mean().item(), split)

    def _reason_to_stop(self, loss: Tensor, requests: deque[HostCopy]) -> str | None:
        """Why to stop the evaluation, on all ranks alike. On a GPU as of the batch before: the host need not wait."""
        _, *request = max_across_ranks(loss, *self.exit_conditions.local_request())
        requests.append(HostCopy(dict(zip(REQUEST, request, strict=True))))
        if len(requests) == 1 and not requests[0].has_arrived:
            return None
        return self.exit_conditions.requested(*requests.popleft().read().values())

    def save(self, iteration: int) -> int:
        """Save a checkpoint if ``--save`` is given and the weights are good. Returns ``iteration``."""
        self.progress.enter("saving", iteration)
        if self.anomalies.weights_are_good:
            with self.log.paused():
                self.checkpointer.save(iteration, self.data.skipped_samples)
        elif self.run.checkpoint.save:
            self.log.info(
                f"  no checkpoint saved after iteration {iteration}: its step was bad, so weights may be wrong"
            )
        return iteration

    def take_snapshot(self, iteration: int) -> None:
        """Take a snapshot, a checkpoint in memory, if the weights are good."""
        if self.snapshots is not None and self.anomalies.weights_are_good:
            self.progress.enter("saving", iteration)
            with self.log.paused():
                self.snapshots.take(iteration, self.data.skipped_samples)

    def _reserve(self, iteration: int) -> None:
        """Allocate the memory of asynchronous saves and snapshots after the first step, which makes the state."""
        with self.log.paused():
            self.checkpointer.reserve(iteration)
            if self.snapshots is not None:
                self.snapshots.reserve(iteration)

    def _train_until_exit(self, finished: int) -> tuple[int, str | None]:
        """Train to the last iteration or to an exit condition, and save.

        Returns the last iteration, and the reason of an early exit or None.
        """
        config = self.run.train
        iteration = last_saved = finished
        early_exit = None
        batches = self.data.training(finished)
        self.log.start()
        self.exit_conditions.defer_signals()
        while iteration < config.train_iters and early_exit is None:
            iteration += 1
            loss = self._step(iteration, batches)
            evaluates, saves = self.evaluates_after(iteration), self.saves_after(iteration)
            request, restart = self._finish_steps(self._waits_after(iteration))
            if restart is not None:
                iteration = last_saved = restart
                batches = self.data.training(restart)
                continue
            if iteration == finished + 1:
                self._reserve(iteration)
            if evaluates:
                self.evaluate(iteration)
            if saves:
                last_saved = self.save(iteration)
            if self.takes_snapshot_after(iteration):
                self.take_snapshot(iteration)
            if evaluates or saves:  # a signal that arrived meanwhile must not wait for another iteration and save
                _, *request = max_across_ranks(loss, *self.exit_conditions.local_request()).tolist()
            if iteration < config.train_iters:
                early_exit = self.exit_conditions.due(iteration, *request)
        if early_exit:
            if not self.run.is_logged(iteration):
                self._log_rest(iteration)
            self.log.info(f"exiting after iteration {iteration}: {early_exit}")
        if last_saved != iteration:
            self.save(iteration)
        self.checkpointer.finish()
        if self.snapshots is not None and self.anomalies.weights_are_good:  # the state is on disk
            self.snapshots.remove()
        return iteration, early_exit

    def _log_rest(self, iteration: int) -> None:
        """Log the iterations up to ``iteration``, which no log interval ends."""
        status = step_status(self.engine)
        means = HostCopy(self.log.means() | {"grad_norm": status.grad_norm})
        self.log.report(iteration, status, means.read(), is_last=True)

    def _waits_after(self, iteration: int) -> bool:
        """Whether the host waits for the GPU after ``iteration``, to evaluate, save, take a snapshot, log or exit."""
        evaluates_or_saves = self.evaluates_after(iteration) or self.saves_after(iteration)
        logs_or_exits = self.run.is_logged(iteration) or due(iteration, self.run.train.exit_interval)
        return evaluates_or_saves or self.takes_snapshot_after(iteration) or logs_or_exits

    def _step(self, iteration: int, batches: Iterator[Batch] | None) -> Tensor:
        """Run one iteration and append it to ``self.steps``. Returns its loss []."""
        self.progress.enter("training", iteration)
        samples = self.run.train.batches.size(iteration)
        self.engine.set_train_batch_size(samples * self.run.parallel.samples_counted)
        with ExitStack() as stack:
            hooks = [*self.hooks]
            for callback in self.callbacks:
                hooks += stack.enter_context(callback.around_iteration(iteration))
            loss = train_batch(self.engine, batches, hooks)
        status = step_status(self.engine)
        self.log.add(iteration, loss, status)
        values: dict[str, float | Tensor | None] = {}
        if self.log.has_line(iteration):
            values |= self.log.means() | {"grad_norm": status.grad_norm}
        if self.run.is_logged(iteration):
            self.engine.wait_for_weights()
            with self.log.paused():
                for callback in self.callbacks:
                    values |= callback.metrics()
        # In most steps the only collective outside the engine: all ranks agree on anomalies, saves and exits.
        agreed = max_across_ranks(loss, self.checkpointer.state, *self.exit_conditions.local_request())
        numbers = HostCopy(dict(zip(AGREED, agreed, strict=True)) | values)
        self.steps.append(Step(iteration, status, numbers))
        return loss

    def _finish_steps(self, waits: bool) -> tuple[Sequence[float], int | None]:
        """Log and check finished iterations: all of them if this ``waits`` for the GPU, else all but the last.

        Returns the exit request, as a maximum over all ranks, and the iteration of the checkpoint that training has
        rewound to, or None.
        """
        request: Sequence[float] = (0, 0)
        while self.steps and (waits or any(request) or len(self.steps) > 1 or self.steps[0].numbers.has_arrived):
            iteration, status, numbers = self.steps.popleft()
            values = numbers.read()
            largest_loss, checkpoint, *request = [values.pop(name) for name in AGREED]
            if values:
                self.log.report(iteration, status, values)
            result = self.anomalies.check(iteration, largest_loss, status)
            if result.problem and (restart := self._handle_bad_step(iteration, result)) is not None:
                self.steps.clear()
                return request, restart
            with self.log.paused():
                self.checkpointer.poll(checkpoint)
        return request, None

    def _handle_bad_step(self, iteration: int, result: StepResult) -> int | None:
        """Log the problem; rewind or raise NumericsError if the flags or the limit require it.

        Returns the iteration of the checkpoint that was loaded, or None if training simply continues.
        """
        text = f"iteration {iteration}: {result.problem}"
        if result.first_iteration == iteration and not result.is_spike:
            with self.log.paused():
                text += f"; {find_origin(self.engine, self.data.training(iteration - 1))}"
        self.log.info(f"  {text}")
        if self.run.train.rewind_on_spike and (result.is_spike or result.limit_reached):
            with self.log.paused():
                self.checkpointer.finish()
                if self.checkpointer.can_go_back:
                    return self._rewind(range(result.first_iteration, iteration + 1))
        if result.limit_reached:
            saved = "; the last checkpoint is from before them" if self.run.checkpoint.save else ""
            raise NumericsError(
                f"{text}: --max-consecutive-bad-steps {self.run.train.max_consecutive_bad_steps} reached{saved}: lower "
                "--lr, check the data, or use --rewind-on-spike"
            )
        return None

    def _rewind(self, bad_iterations: range) -> int:
        """Load the newest checkpoint and skip the samples of ``bad_iterations``. Returns its iteration."""
        config = replace(
            self.run.checkpoint, load=self.run.checkpoint.save, finetune=False, no_load_optim=False, no_load_rng=False
        )
        run = replace(self.run, checkpoint=config)
        saved = select_checkpoint(run)
        assert saved is not None, "the folder holds a checkpoint"
        self.rewinds[saved.tag] += 1
        if self.rewinds[saved.tag] > self.run.train.max_consecutive_bad_steps:
            raise NumericsError(
                f"iteration {bad_iterations.stop - 1} is bad again after rewinding {self.rewinds[saved.tag] - 1} times "
                f"to {saved.path}: lower --lr, or start from an older checkpoint"
            )
        skipped = self.data.skip(bad_iterations)
        if self.snapshots is not None:
            self.snapshots.discard()
        load_checkpoint(self.engine, run, self.layout, saved)
        self.engine.weights_changed()
        self.anomalies.reset()
        self.log.info(f"  rewinding to {saved.path}, skipping samples {skipped.start} to {skipped.stop - 1}")
        return saved.iteration
