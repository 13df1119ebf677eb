"""The training run: build, resume, train, evaluate, save."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.tracker import SavedRun, holds_checkpoint, keep_ds_config, newest
from megatron.config import RunConfig
from megatron.data.gpt2_dataset import Datasets, GPT2Dataset, build_datasets
from megatron.data.loader import Batch, batches, sample_number, with_range
from megatron.data.splits import split_weights
from megatron.departure import Departures
from megatron.describe import describe_stages
from megatron.engine import build_engine, eval_batch, step_status, train_batch
from megatron.errors import NumericsError
from megatron.launch.accelerator import check_device
from megatron.launch.extensions import build_extensions
from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
from megatron.loss_weights import weighted, weighted_by_micro_batch
from megatron.metrics import MetricsLogger
from megatron.mpu.layout import ParallelLayout, distributed
from megatron.mpu.random import model_parallel_manual_seed
from megatron.numerics import StepWatch, Verdict, agreed, find_origin
from megatron.summary import describe_model, describe_run, full_config


def pretrain(run: RunConfig, saved: SavedRun | None) -> int:
    """Train as ``run`` says, from ``saved`` on or from the beginning. Every rank calls it.

    Returns the exit code of the process: 0, or that of the departure it was asked for.
    """
    departures = Departures(run)
    silence_known_warnings()
    check_device(run.parallel.device, run.parallel.local_rank or 0)
    build_extensions(run)
    with distributed(run.parallel, verbose=run.logging.verbose) as layout:
        log = MetricsLogger(run, speaks=layout.rank == 0)
        log.say(describe_run(run))
        if run.parallel.uses_pipeline:
            log.say(describe_stages(run))
        log.text("config", full_config(run))
        if layout.rank == 0 and run.checkpoint.save:
            keep_ds_config(run, Path(run.checkpoint.save))
        model_parallel_manual_seed(run.train.seed, layout)
        with deepspeed_silenced(run.logging.verbose):
            engine = build_engine(run, layout)
            iteration = load_checkpoint(engine, run, saved) if saved else 0
        log.say(describe_model(engine.module, layout))
        log.say(_describe_start(run, saved, iteration))
        left_out = saved.left_out if saved and iteration else ()
        exit_code = Trainer(run, engine, layout, log, departures, left_out).train(iteration)
        log.close()
    return exit_code


class Trainer:
    """An engine with its data: what the training loop needs at hand."""

    def __init__(
        self,
        run: RunConfig,
        engine: DeepSpeedEngine,
        layout: ParallelLayout,
        log: MetricsLogger,
        departures: Departures,
        left_out: Sequence[range] = (),
    ):
        self.run, self.engine, self.layout, self.log, self.departures = run, engine, layout, log, departures
        self.watch = StepWatch(run)
        self.left_out = left_out
        self.returns: Counter[str] = Counter()
        self.datasets = self._datasets()

    def train(self, finished: int) -> int:
        """From the iteration behind ``finished`` to the last, then evaluate on the test split; the exit code.

        Raises NumericsError where too many iterations in a row went wrong.
        """
        config, save_interval = self.run.train, self.run.checkpoint.save_interval
        iteration = saved_at = finished
        departure = None
        train_batches = self._training_batches(finished)
        self.log.start()
        while iteration < config.train_iters and departure is None:
            iteration += 1
            learning_rate = self.engine.get_lr()[0]
            loss = train_batch(self.engine, train_batches)
            status = step_status(self.engine)
            self.log.step(iteration, loss, learning_rate, status)
            verdict = self.watch.judge(iteration, agreed(loss), status)
            if verdict.fault and (restart := self._answer(iteration, verdict)) is not None:
                iteration = saved_at = restart
                train_batches = self._training_batches(restart)
                continue
            if _due(iteration, config.eval_interval):
                self.evaluate(iteration)
            if _due(iteration, save_interval):
                saved_at = self.save(iteration)
            if departure := self.departures.due(iteration):
                self.log.say(f"leaving after iteration {iteration}: {departure.reason}")
        if saved_at != iteration:
            self.save(iteration)
        if departure:
            return departure.exit_code
        if not _due(iteration, config.eval_interval):
            self.evaluate(iteration)
        self.evaluate(iteration, split="test")
        return 0

    def _answer(self, iteration: int, verdict: Verdict) -> int | None:
        """Say what went wrong, and go back or stop where that was the last straw.

        Returns the iteration that training went back to, or None where it goes on.
        """
        text = f"iteration {iteration}: {verdict.fault}"
        if verdict.since == iteration and not verdict.is_spike:
            with self._paused():
                text += f"; {find_origin(self.engine, self._training_batches(iteration - 1))}"
        self.log.say(f"  {text}")
        can_go_back = self.run.train.rewind_on_spike and holds_checkpoint(Path(self.run.checkpoint.save))
        if can_go_back and (verdict.is_spike or verdict.is_last_straw):
            with self._paused():
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
        size = self.run.train.global_batch_size
        first, last = (
            sample_number(place, self.left_out)
            for place in ((culprits.start - 1) * size, (culprits.stop - 1) * size - 1)
        )
        self.left_out = with_range(self.left_out, range(first, last + 1))
        saved = newest(Path(self.run.checkpoint.save))
        self.returns[saved.tag] += 1
        if self.returns[saved.tag] > self.run.train.max_consecutive_bad_steps:
            raise NumericsError(
                f"iteration {culprits.stop - 1} went wrong again behind {self.returns[saved.tag] - 1} returns to "
                f"{saved.folder / saved.tag}: lower --lr, or begin at an older checkpoint"
            )
        load_checkpoint(self.engine, self.run, saved)
        self.watch.forget()
        self.datasets = self._datasets()
        self.log.say(f"  going back to {saved.folder / saved.tag}, without samples {first} to {last}")
        return saved.iteration

    def evaluate(self, iteration: int, split: str = "valid") -> None:
        """The loss over ``--eval-iters`` global batches, the next ones of the split."""
        config = self.run.train
        weight = dict(zip(("train", "valid", "test"), split_weights(self.run.data.split), strict=True))[split]
        if not config.eval_iters or not weight:
            return
        with self._paused():
            earlier = (iteration - 1) // config.eval_interval if split == "valid" else 0
            first_sample = earlier * config.eval_iters * config.global_batch_size
            eval_batches = self._batches(split, first_sample)
            losses = [eval_batch(self.engine, eval_batches) for _ in range(config.eval_iters)]
            self.log.evaluation(iteration, torch.stack(losses).mean().item(), split)

    def save(self, iteration: int) -> int:
        """Write a checkpoint, if there is a folder for it and the weights can be trusted; ``iteration`` again."""
        if self.run.checkpoint.save and not self.watch.trusts_weights:
            self.log.say(f"  nothing saved behind iteration {iteration}, which went wrong: a weight may be the cause")
        elif self.run.checkpoint.save:
            with self._paused():
                path = save_checkpoint(self.engine, self.run, iteration, self.left_out)
                self.log.say(f"  saved {path}")
        return iteration

    def _training_batches(self, finished: int) -> Iterator[Batch] | None:
        """Those of the iterations behind ``finished``."""
        return self._batches("train", finished * self.run.train.global_batch_size, self.left_out)

    def _batches(self, split: str, first_sample: int, left_out: Sequence[range] = ()) -> Iterator[Batch] | None:
        """Micro-batches of this rank from ``first_sample`` on; None where a stage reads no data."""
        if self.datasets is None:
            return None
        dataset: GPT2Dataset = getattr(self.datasets, split)
        data, train, group = self.run.data, self.run.train, self.layout.data_group
        micro_batches = batches(
            dataset,
            first_sample=first_sample,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            data_rank=group.rank(),
            data_size=group.size(),
            num_workers=data.num_workers,
            eod_token=self.run.model.eod_token,
            eod_mask_loss=data.eod_mask_loss,
            left_out=left_out,
        )
        if train.loss_normalization == "micro-batch":
            return weighted_by_micro_batch(micro_batches)
        return weighted(micro_batches, train.gradient_accumulation_steps, group, masks=data.eod_mask_loss)

    def _datasets(self) -> Datasets | None:
        """What this rank reads; None on a stage between others."""
        if not (self.layout.is_first_stage or self.layout.is_last_stage):
            return None
        run, train = self.run, self.run.train
        return build_datasets(
            run.data,
            vocab_size=run.model.vocab_size,
            global_batch_size=train.global_batch_size,
            train_iters=train.train_iters + -(-sum(map(len, self.left_out)) // train.global_batch_size),
            eval_interval=train.eval_interval,
            eval_iters=train.eval_iters,
            seed=train.seed,
        )

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
        return f"> loaded {saved.folder / saved.tag}; training goes on behind iteration {iteration}"
    if run.checkpoint.load:
        return f"> {run.checkpoint.load} holds no checkpoint yet and is also --save: a fresh start"
    return "> a fresh start"
