"""Fine-tune BERT with a classifier: the training loop of the training programs, with the accuracy after each epoch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.checkpoint.compatibility import at_saved_sample
from megatron.checkpoint.load import FRESH, Loaded, load_pretrained, select_checkpoint
from megatron.checkpoint.save import lock_folder
from megatron.checkpoint.snapshot_recovery import select_newest
from megatron.checkpoint.snapshots import requested_snapshots
from megatron.cli.settings_file import settings_text
from megatron.common.errors import CheckpointError, counted
from megatron.engines.engine import Engine, eval_batch
from megatron.model.loss import correct_answers
from megatron.tools.finetuning.request import TaskData, TaskRun
from megatron.tools.finetuning.rows import RowIterators
from megatron.tools.reporting.tracing import requested_traces
from megatron.training.callbacks import Callback
from megatron.training.measurements import requested_measurements
from megatron.training.metrics import MetricsLogger
from megatron.training.setup import initialized_ranks, is_finished, log_configuration, start_engine
from megatron.training.trainer import ExitConditions, Trainer, due


class EpochTrainer(Trainer):
    """The training loop that also saves, and measures the accuracy, after each epoch."""

    def __init__(self, *, task: TaskData, data: RowIterators, **parts: Any) -> None:
        super().__init__(data=data, **parts)
        self.task, self.rows = task, data

    def evaluates_after(self, iteration: int) -> bool:
        """Also after each epoch."""
        return super().evaluates_after(iteration) or self._ends_epoch(iteration)

    def saves_after(self, iteration: int) -> bool:
        """Also after each epoch."""
        return super().saves_after(iteration) or self._ends_epoch(iteration)

    def evaluate(self, iteration: int, split: str = "valid") -> None:
        """Log the validation loss as the base class does, if it is due; and the accuracy after an epoch or the last."""
        if due(iteration, self.run.train.eval_interval):
            super().evaluate(iteration, split)
        if split == "valid" and (self._ends_epoch(iteration) or iteration == self.run.train.train_iters):
            self.measure(iteration)

    def measure(self, iteration: int) -> None:
        """Log the accuracy on each table of ``--valid-data``, and on all of them together."""
        if not self.task.validation:
            return
        self.progress.enter("evaluation", iteration)
        epoch = round(iteration / self.task.iterations_per_epoch, 4) if self.task.training else None
        place = f"iteration {iteration}" if epoch is None else f"epoch {epoch:g}"
        with self.log.paused():
            correct = [self._correct(number) for number in range(len(self.task.validation))]
        rows = [len(table.rows) for table in self.task.validation]
        for table, right, count in zip(self.task.validation, correct, rows, strict=True):
            self.log.info(f"  {place} | {table.path} | accuracy {right / count:.2%} ({right} of {count})")
        if len(rows) > 1:
            share = sum(correct) / sum(rows)
            self.log.info(f"  {place} | overall | accuracy {share:.2%} ({sum(correct)} of {sum(rows)})")
        figures = {} if epoch is None else {"epoch": epoch}
        figures |= {"validation_accuracy": sum(correct) / sum(rows)}
        figures |= {
            f"validation_accuracy/{table.path}": right / count
            for table, right, count in zip(self.task.validation, correct, rows, strict=True)
            if len(rows) > 1
        }
        self.log.record(iteration, figures)

    def _ends_epoch(self, iteration: int) -> bool:
        return due(iteration, self.task.iterations_per_epoch)

    def _correct(self, number: int) -> int:
        """How many rows of the table ``number`` are classified correctly; the same on every rank."""
        batches, size = self.rows.file_batches(number), self.run.train.global_batch_size
        micro_batches = size // self.run.train.micro_batch_size
        with self._counting():
            what = f"classifying {self.task.validation[number].path}"
            means = [
                eval_batch(self.engine, batches, self.hooks).item()
                for _ in self.log.counting(self.rows.global_batches(number), what)
            ]
        return sum(round(mean * micro_batches) for mean in means)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Let the engine compute the number of correct answers in place of the loss."""
        module = self.engine.module
        loss_fn, module.loss_fn = module.loss_fn, correct_answers
        try:
            yield
        finally:
            module.loss_fn = loss_fn


def finetune(task: TaskRun, callbacks: Sequence[Callback]) -> int:
    """Set up the ranks, build engine and data, load the weights, train. Returns the exit code of the process."""
    run = task.run
    exit_conditions = ExitConditions(run)
    with initialized_ranks(run, callbacks) as (layout, progress), lock_folder(run) as lock:
        saved = select_newest(run, lock)
        pretrained = None if saved or task.pretrained is None else select_checkpoint(task.pretraining(run))
        if saved is None and task.data.epochs == 0:
            raise CheckpointError(f"--load {run.checkpoint.load} holds no checkpoint to evaluate")
        run = at_saved_sample(saved, run) if saved else run
        evaluates = task.data.epochs == 0
        if saved and not evaluates and is_finished(saved, run, length_flag="--epochs", evaluation_flag="--epochs 0"):
            return 0
        log = MetricsLogger(run, is_main_rank=layout.rank == 0)
        log_configuration(run, log, callbacks)
        log.info(_describe(task.data, run.model.classes))

        def load_weights(engine: Engine) -> Loaded:
            return Loaded(0, (load_pretrained(engine, run, layout, pretrained),)) if pretrained else FRESH

        engine, checkpointer, loaded = start_engine(
            run, layout, saved, lock, log, settings=settings_text(run), load_weights=load_weights
        )
        skipped = saved.skipped_samples if saved and not run.checkpoint.finetune else ()
        observed = run, layout, engine.module
        trainer = EpochTrainer(
            task=task.data,
            run=run,
            layout=layout,
            engine=engine,
            data=RowIterators(run, layout, task.data, skipped),
            checkpointer=checkpointer,
            log=log,
            exit_conditions=exit_conditions,
            progress=progress,
            snapshots=None if evaluates else requested_snapshots(checkpointer, run, log.info),
            callbacks=[*callbacks, *requested_traces(*observed), *requested_measurements(*observed)],
        )
        if evaluates:
            assert saved is not None
            trainer.measure(saved.iteration)
            log.close()
            return 0
        return trainer.train(finished=loaded.iteration)


def _describe(task: TaskData, classes: Sequence[str]) -> str:
    """The task in lines of text."""
    lines = [f"> task      {task.name}: {', '.join(classes)}"]
    for kind, tables in (("train", task.training), ("valid", task.validation)):
        for table in tables:
            skipped = f"; {table.skipped:,} skipped, with another number of columns" if table.skipped else ""
            lines.append(f"> {kind:9} {table.path}: {counted(len(table.rows), 'row')}{skipped}")
    lines.append(f"> epochs    {task.epochs:g} of {counted(task.iterations_per_epoch, 'iteration')}")
    return "\n".join(lines)
