"""The training run: build, resume, train, evaluate, save."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.compatibility import at_saved_sample
from megatron.checkpoint.load import FRESH, load_checkpoint, select_checkpoint
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.saved_run import SavedRun
from megatron.checkpoint.tracker import holds_checkpoint
from megatron.config import RunConfig
from megatron.config.errors import NumericsError
from megatron.config.summary import describe_stages
from megatron.data.splits import has_split
from megatron.launch.distributed import distributed
from megatron.launch.extensions import build_extensions, check_device
from megatron.launch.progress import ProgressState
from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
from megatron.launch.rank_failure import rank_failure_monitor
from megatron.launch.watchdog import hang_watchdog
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.tools.reporting.record import write_record
from megatron.training.anomaly_detection import StepWatch, Verdict, agreed, find_origin
from megatron.training.callbacks import Instrument, instruments
from megatron.training.data_iterators import Feed
from megatron.training.engines import Listener, build_engine, eval_batch, step_status, train_batch
from megatron.training.exit_conditions import Departures
from megatron.training.memory import exhaustion_named
from megatron.training.metrics import MetricsLogger
from megatron.training.optional_files import unless_refused
from megatron.training.run_summary import describe_model, describe_run, device_name, full_config


def pretrain(run: RunConfig) -> int:
    """Train as ``run`` says, from its checkpoint on or from the beginning. Every rank calls it.

    Returns the exit code of the process: 0, or that of the departure it was asked for.
    """
    departures = Departures(run)
    silence_known_warnings()
    check_device(run.parallel.device, run.parallel.local_rank or 0)
    build_extensions(run)
    progress = ProgressState()
    with (
        distributed(run.parallel, verbose=run.logging.verbose) as layout,
        rank_failure_monitor(progress),
        hang_watchdog(run, layout, progress),
        exhaustion_named(run, layout, progress),
    ):
        saved = select_checkpoint(run)
        run = at_saved_sample(saved, run) if saved else run
        log = MetricsLogger(run, speaks=layout.rank == 0)
        log.say(describe_run(run))
        if run.parallel.uses_pipeline:
            log.say(describe_stages(run))
        log.text("config", full_config(run))
        if run.observe.run_dir and layout.rank == 0:
            with unless_refused("run.json"):
                write_record(run, device_name())
        model_parallel_manual_seed(run.train.seed, layout)
        with deepspeed_silenced(run.logging.verbose):
            engine = build_engine(run, layout)
            goes_on = saved is not None and not run.checkpoint.finetune
            checkpointer = Checkpointer(engine, run, log.say, saved.history if goes_on else ())
            loaded = load_checkpoint(engine, run, layout, saved) if saved else FRESH
        log.say(describe_model(engine.module, layout))
        for line in loaded.remarks:
            log.say(f"> {line}")
        log.say(_describe_start(run, saved, loaded.iteration))
        feed = Feed(run, layout, saved.skipped_samples if saved and loaded.iteration else ())
        looks = instruments(run, layout, engine.module)
        trainer = Trainer(run, engine, layout, feed, log, checkpointer, departures, progress, looks)
        exit_code = trainer.train(loaded.iteration)
        for instrument in looks:
            instrument.close()
        log.close()
    return exit_code


class Trainer:
    """An engine with all that the training loop needs at hand."""

    def __init__(
        self,
        run: RunConfig,
        engine: DeepSpeedEngine,
        layout: ParallelLayout,
        feed: Feed,
        log: MetricsLogger,
        checkpointer: Checkpointer,
        departures: Departures,
        progress: ProgressState,
        looks: Sequence[Instrument],
    ):
        self.run, self.engine, self.layout, self.feed, self.log = run, engine, layout, feed, log
        self.checkpointer, self.departures, self.watch = checkpointer, departures, StepWatch(run)
        self.progress, self.looks = progress, looks
        self.listeners: list[Listener] = [] if run.logging.watchdog_minutes is None else [progress.instruct]
        self.returns: Counter[str] = Counter()
        """How often training went back to each checkpoint."""

    def train(self, finished: int) -> int:
        """From the iteration behind ``finished`` to the last, then evaluate on the test split; the exit code.

        Raises NumericsError where too many iterations in a row went wrong.
        """
        config, save_interval = self.run.train, self.run.checkpoint.save_interval
        iteration = saved_at = finished
        departure = None
        batches = self.feed.training(finished)
        self.log.start()
        while iteration < config.train_iters and departure is None:
            iteration += 1
            self.progress.enter("training", iteration)
            learning_rate = self.engine.get_lr()[0]
            with ExitStack() as stack:
                heard = [listener for look in self.looks for listener in stack.enter_context(look.iteration(iteration))]
                loss = train_batch(self.engine, batches, [*self.listeners, *heard])
            status = step_status(self.engine)
            self.log.step(iteration, loss, learning_rate, status)
            verdict = self.watch.judge(iteration, agreed(loss), status)
            if verdict.fault and (restart := self._answer(iteration, verdict)) is not None:
                iteration = saved_at = restart
                batches = self.feed.training(restart)
                continue
            with self._paused():
                self.checkpointer.poll()
            if _due(iteration, config.eval_interval):
                self.evaluate(iteration)
            if _due(iteration, save_interval):
                saved_at = self.save(iteration)
            if iteration < config.train_iters and (departure := self.departures.due(iteration)):
                self.log.say(f"leaving after iteration {iteration}: {departure.reason}")
        if saved_at != iteration:
            self.save(iteration)
        self.checkpointer.finish()
        if departure:
            return departure.exit_code
        if not _due(iteration, config.eval_interval):
            self.evaluate(iteration)
        self.evaluate(iteration, split="test")
        return 0

    def evaluate(self, iteration: int, split: str = "valid") -> None:
        """The loss over ``--eval-iters`` global batches, the next ones of the split."""
        config = self.run.train
        if not config.eval_iters or not has_split(self.run.data, split):
            return
        self.progress.enter("evaluation", iteration)
        with self._paused():
            earlier = (iteration - 1) // config.eval_interval if split == "valid" else 0
            batches = self.feed.evaluation(split, earlier)
            losses = [eval_batch(self.engine, batches, self.listeners) for _ in range(config.eval_iters)]
            self.log.evaluation(iteration, torch.stack(losses).mean().item(), split)

    def save(self, iteration: int) -> int:
        """Save a checkpoint, if there is a folder for it and the weights can be trusted; ``iteration`` again."""
        self.progress.enter("saving", iteration)
        if self.watch.trusts_weights:
            with self._paused():
                self.checkpointer.save(iteration, self.feed.left_out)
        elif self.run.checkpoint.save:
            self.log.say(f"  nothing saved behind iteration {iteration}, which went wrong: a weight may be the cause")
        return iteration

    def _answer(self, iteration: int, verdict: Verdict) -> int | None:
        """Say what went wrong, and go back or stop where that was the last straw.

        Returns the iteration that training went back to, or None where it goes on.
        """
        text = f"iteration {iteration}: {verdict.fault}"
        if verdict.since == iteration and not verdict.is_spike:
            with self._paused():
                text += f"; {find_origin(self.engine, self.feed.training(iteration - 1))}"
        self.log.say(f"  {text}")
        if self.run.train.rewind_on_spike and (verdict.is_spike or verdict.is_last_straw):
            with self._paused():
                self.checkpointer.finish()
                if holds_checkpoint(Path(self.run.checkpoint.save)):
                    return self._go_back(range(verdict.since, iteration + 1))
        if verdict.is_last_straw:
            raise NumericsError(
                f"{text}: as many in a row as --max-consecutive-bad-steps {self.run.train.max_consecutive_bad_steps} "
                "allows; weights and checkpoints are as they were: lower --lr, look at the data, or go on with "
                "--rewind-on-spike"
            )
        return None

    def _go_back(self, culprits: range) -> int:
        """Load the newest checkpoint, and leave the samples of iterations ``culprits`` out; its iteration."""
        config = replace(
            self.run.checkpoint, load=self.run.checkpoint.save, finetune=False, no_load_optim=False, no_load_rng=False
        )
        run = replace(self.run, checkpoint=config)
        saved = select_checkpoint(run)
        self.returns[saved.tag] += 1
        if self.returns[saved.tag] > self.run.train.max_consecutive_bad_steps:
            raise NumericsError(
                f"iteration {culprits.stop - 1} went wrong again behind {self.returns[saved.tag] - 1} returns to "
                f"{saved.folder / saved.tag}: lower --lr, or begin at an older checkpoint"
            )
        samples = self.feed.leave_out(culprits)
        load_checkpoint(self.engine, run, self.layout, saved)
        self.watch.forget()
        self.log.say(
            f"  going back to {saved.folder / saved.tag}, without samples {samples.start} to {samples.stop - 1}"
        )
        return saved.iteration

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave what happens inside out of the pace of training."""
        start = time.monotonic()
        yield
        self.log.pause(time.monotonic() - start)


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0


def _describe_start(run: RunConfig, saved: SavedRun | None, iteration: int) -> str:
    if saved:
        problems = "".join(f"> warning: {problem}\n" for problem in saved.newer_problems)
        return f"{problems}> loaded {saved.folder / saved.tag}; training goes on behind iteration {iteration}"
    if run.checkpoint.auto_resume:
        return f"> {run.checkpoint.save} holds no checkpoint yet: a fresh start"
    if run.checkpoint.load:
        return f"> {run.checkpoint.load} holds no checkpoint yet and is also --save: a fresh start"
    return "> a fresh start"
