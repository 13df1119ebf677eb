"""The training run: build, resume, train, evaluate, save."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.checkpointing import FRESH, load_checkpoint, save_checkpoint
from megatron.checkpoint.fit import behind
from megatron.checkpoint.tracker import SavedRun, keep_ds_config
from megatron.config import RunConfig
from megatron.data.gpt2_dataset import Datasets, GPT2Dataset, build_datasets
from megatron.data.loader import Batch, batches
from megatron.data.splits import split_weights
from megatron.engine import build_engine, eval_batch, step_status, train_batch
from megatron.launch.accelerator import check_device
from megatron.launch.extensions import build_extensions
from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
from megatron.loss_weights import weighted, weighted_by_micro_batch
from megatron.metrics import MetricsLogger
from megatron.mpu.layout import ParallelLayout, distributed
from megatron.mpu.random import model_parallel_manual_seed
from megatron.summary import describe_model, describe_run, describe_stages, full_config


def pretrain(run: RunConfig, saved: SavedRun | None) -> None:
    """Train as ``run`` says, from ``saved`` on or from the beginning. Every rank calls it."""
    if saved:
        run = behind(saved.description, run)
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
            loaded = load_checkpoint(engine, run, layout, saved) if saved else FRESH
        log.say(describe_model(engine.module, layout))
        for line in loaded.remarks:
            log.say(f"> {line}")
        log.say(_describe_start(run, saved, loaded.iteration))
        Trainer(run, engine, layout, log).train(loaded.iteration)
        log.close()


class Trainer:
    """An engine with its data: what the training loop needs at hand."""

    def __init__(self, run: RunConfig, engine: DeepSpeedEngine, layout: ParallelLayout, log: MetricsLogger):
        self.run, self.engine, self.layout, self.log = run, engine, layout, log
        self.datasets: Datasets | None = _datasets(run) if layout.is_first_stage or layout.is_last_stage else None

    def train(self, finished: int) -> None:
        """From the iteration behind ``finished`` to the last; then evaluate on the test split."""
        config, save_interval = self.run.train, self.run.checkpoint.save_interval
        iteration = saved_at = finished
        train_batches = self._batches("train", first_sample=config.consumed_samples(finished))
        self.log.start()
        for iteration in range(finished + 1, config.train_iters + 1):
            learning_rate = self.engine.get_lr()[0]
            loss = train_batch(self.engine, train_batches)
            self.log.step(iteration, loss, learning_rate, step_status(self.engine))
            if _due(iteration, config.eval_interval):
                self.evaluate(iteration)
            if _due(iteration, save_interval):
                saved_at = self.save(iteration)
            if _due(iteration, config.exit_interval):
                self.log.say(f"leaving after iteration {iteration}, as --exit-interval {config.exit_interval} says")
                break
        if saved_at != iteration:
            self.save(iteration)
        if iteration == config.train_iters:
            if not _due(iteration, config.eval_interval):
                self.evaluate(iteration)
            self.evaluate(iteration, split="test")

    def evaluate(self, iteration: int, split: str = "valid") -> None:
        """The loss over ``--eval-iters`` global batches, the next ones of the split."""
        config = self.run.train
        weight = dict(zip(("train", "valid", "test"), split_weights(self.run.data.split), strict=True))[split]
        if not config.eval_iters or not weight:
            return
        with self._paused():
            earlier = (iteration - 1) // config.eval_interval if split == "valid" else 0
            first_sample = earlier * config.eval_iters * config.global_batch_size
            eval_batches = self._batches(split, first_sample=first_sample)
            losses = [eval_batch(self.engine, eval_batches) for _ in range(config.eval_iters)]
            self.log.evaluation(iteration, torch.stack(losses).mean().item(), split)

    def save(self, iteration: int) -> int:
        """Write a checkpoint, if there is a folder for it; ``iteration`` again."""
        if self.run.checkpoint.save:
            with self._paused():
                path = save_checkpoint(self.engine, self.run, iteration)
                self.log.say(f"  saved {path}")
        return iteration

    def _batches(self, split: str, *, first_sample: int) -> Iterator[Batch] | None:
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
        )
        if train.loss_normalization == "micro-batch":
            return weighted_by_micro_batch(micro_batches)
        return weighted(micro_batches, train.gradient_accumulation_steps, group, masks=data.eod_mask_loss)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave what happens inside out of the pace of training."""
        start = time.monotonic()
        yield
        self.log.pause(time.monotonic() - start)


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0


def _datasets(run: RunConfig) -> Datasets:
    batch, last_sample = run.train.global_batch_size, run.train.consumed_samples(run.train.train_iters)
    return build_datasets(
        run.data,
        vocab_size=run.model.vocab_size,
        global_batch_size=batch,
        train_iters=max(run.train.train_iters, -(-last_sample // batch)),
        eval_interval=run.train.eval_interval,
        eval_iters=run.train.eval_iters,
        seed=run.train.seed,
    )


def _describe_start(run: RunConfig, saved: SavedRun | None, iteration: int) -> str:
    if saved:
        return f"> loaded {saved.folder / saved.tag}; training goes on behind iteration {iteration}"
    if run.checkpoint.load:
        return f"> {run.checkpoint.load} holds no checkpoint yet and is also --save: a fresh start"
    return "> a fresh start"
