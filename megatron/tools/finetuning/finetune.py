"""Fine-tunes BERT with a classifier head: the pretraining loop, with the accuracy after each epoch.

A sample is a row of a table as tokens:

    [CLS] first text [SEP] second text [SEP] [PAD] ...

Each epoch has its own shuffle and complete global batches: remaining rows are dropped, or padded with empty samples of
weight 0. So a sample only depends on its index, not on the layout.

b batch, s sequence
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from megatron.checkpoint.load import FRESH, Loaded, load_pretrained, select_checkpoint
from megatron.checkpoint.run_file import SavedRun
from megatron.common.errors import CheckpointError, counted
from megatron.config import RunConfig
from megatron.data.datasets import Datasets, split_samples
from megatron.data.loader import Batch
from megatron.data.splits import Samples, seed_words
from megatron.engines.engine import Engine, eval_batch
from megatron.parallel.layout import ParallelLayout
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.words import WordPieceTokenizer
from megatron.tools.finetuning.request import TaskRun
from megatron.tools.finetuning.tables import Table
from megatron.tools.pretraining import Program, train
from megatron.training.callbacks import Callback
from megatron.training.data_iterators import DataIterators, on_device, reads_data
from megatron.training.exit_conditions import due
from megatron.training.trainer import Trainer


class TokenizedRows:
    """The tokenized rows of tables, in memory; ``samples`` pads them to ``seq_length``."""

    def __init__(
        self, tables: Sequence[Table], tokenizer: WordPieceTokenizer, classes: Sequence[str], seq_length: int
    ) -> None:
        rows = [row for table in tables for row in table.rows]
        numbers = {label: number for number, label in enumerate(classes)}
        self.seq_length, self._pad = seq_length, tokenizer.pad
        self._labels = np.array([numbers[row.label] for row in rows], np.int64)
        texts = [tokenizer.tokenize_batch([row.texts[part] for row in rows]) for part in range(len(rows[0].texts))]
        samples = [_with_special_tokens(parts, tokenizer, seq_length) for parts in zip(*texts, strict=True)]
        self._tokens = [np.array(tokens, np.int32) for tokens, _ in samples]
        self._first_lengths = [length for _, length in samples]

    def __len__(self) -> int:
        return len(self._labels)

    def samples(self, indices: Sequence[int]) -> np.ndarray:
        """The rows at ``indices``, int64 [n, 1 + 2 * s]: label, tokens, token types. Index -1 is an empty sample.

        Token types are 0 and 1 for the texts, and -1 for padding. The label of an empty sample is -1.
        """
        out = np.full((len(indices), 1 + 2 * self.seq_length), -1, np.int64)
        out[:, 1 : 1 + self.seq_length] = self._pad
        for row, index in zip(out, indices, strict=True):
            tokens = self._tokens[max(index, 0)]  # an empty sample needs some tokens to attend to
            row[0] = self._labels[index] if index >= 0 else -1
            row[1 : 1 + len(tokens)] = tokens
            types = row[1 + self.seq_length :]
            types[: len(tokens)] = 1
            types[: self._first_lengths[max(index, 0)]] = 0
        return out


def _with_special_tokens(
    parts: Sequence[list[int]], tokenizer: WordPieceTokenizer, seq_length: int
) -> tuple[list[int], int]:
    """The tokens of a sample, and the number of tokens of its first text. The longer text is truncated first."""
    room = seq_length - 1 - len(parts)
    first = parts[0]
    if len(parts) == 1:
        return [tokenizer.cls, *first[:room], tokenizer.sep], min(len(first), room) + 2
    second = parts[1]
    length = min(len(first), max(room - len(second), room - room // 2))
    second = second[: room - length]
    return [tokenizer.cls, *first[:length], tokenizer.sep, *second, tokenizer.sep], length + 2


class RowStream(Samples):
    """The rows of the range ``within`` as epochs of ``per_epoch`` samples, each shuffled if there is a ``seed``."""

    def __init__(
        self, rows: TokenizedRows, within: range, *, per_epoch: int, samples: int, seed: int | None = None
    ) -> None:
        super().__init__(samples)
        self._rows, self._within, self._per_epoch, self._seed = rows, within, per_epoch, seed
        self._order = lru_cache(maxsize=2)(self._shuffled_rows)

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        """The samples at ``indices``, as arrays of ``TokenizedRows.samples``."""
        chosen = []
        for index in indices:
            epoch, position = divmod(index, self._per_epoch)
            order = self._order(epoch)
            chosen.append(int(order[position]) if position < len(order) else -1)
        return self._rows.samples(chosen)

    def _shuffled_rows(self, epoch: int) -> np.ndarray:
        rows = np.arange(self._within.start, self._within.stop)
        if self._seed is None:
            return rows
        return np.random.RandomState([*seed_words(self._seed), epoch]).permutation(rows)


class RowIterators(DataIterators):
    """Data iterators over the rows of a task. The targets of a micro-batch are labels [b] and weights [b]."""

    def __init__(
        self, run: RunConfig, layout: ParallelLayout, task: TaskRun, skipped_samples: Sequence[range] = ()
    ) -> None:
        self._task = task
        if reads_data(run, layout):
            self._training, self._validation = (
                _tokenized(tables, run) if tables else None for tables in (task.training, task.validation)
            )
        # The rows are in memory, so worker processes would not help.
        super().__init__(replace(run, data=replace(run.data, num_workers=0)), layout, skipped_samples)

    def has(self, split: str) -> bool:
        """Whether there are rows for validation; there is no test split."""
        return split == "valid" and bool(self._task.validation)

    def file_batches(self, number: int) -> Iterator[Batch] | None:
        """Micro-batches of all rows of validation file ``number``, in order; None if this rank reads no data.

        Weights are 1, and 0 for the empty samples that pad the last of the ``global_batches(number)``.
        """
        if self._validation is None:
            return None
        stops = list(accumulate(len(table.rows) for table in self._task.validation))
        rows = range(stops[number] - len(self._task.validation[number].rows), stops[number])
        train = self._run.train
        samples = self.global_batches(number) * train.global_batch_size
        stream = RowStream(self._validation, rows, per_epoch=samples, samples=samples)
        return on_device(self._micro_batches(stream, train.evaluation_batches))

    def global_batches(self, number: int) -> int:
        """Number of global batches of validation file ``number``."""
        return -(-len(self._task.validation[number].rows) // self._run.train.global_batch_size)

    def _open(self) -> Datasets:
        train, size = self._run.train, self._run.train.global_batch_size
        training = validation = None
        if self._training is not None:
            training = RowStream(
                self._training,
                range(len(self._training)),
                per_epoch=self._task.iterations_per_epoch * size,
                samples=split_samples(train)["train"] + size,
                seed=train.seed,
            )
        if self._validation is not None:
            rows = len(self._validation)
            evaluations = train.train_iters // train.eval_interval + 1
            samples = evaluations * train.eval_iters * size
            validation = RowStream(self._validation, range(rows), per_epoch=rows, samples=samples)
        return Datasets(training, validation, None)

    def _to_batch(self, rows: Tensor) -> Batch:
        labels = rows[:, 0]
        return Batch(rows[:, 1:].unflatten(1, (2, -1)).contiguous(), (labels.clamp(min=0), labels.ge(0).float()))


def _tokenized(tables: Sequence[Table], run: RunConfig) -> TokenizedRows:
    tokenizer = build_tokenizer(run.data.tokenizer_type, run.data.vocab_file, run.data.merge_file)
    assert isinstance(tokenizer, WordPieceTokenizer)
    return TokenizedRows(tables, tokenizer, run.model.classes, run.data.seq_length)


class EpochTrainer(Trainer):
    """Training loop that also saves, and measures the accuracy, after each epoch.

    With ``evaluated`` it does not train, but measures the accuracy of the loaded checkpoint of that iteration.
    """

    def __init__(self, *, task: TaskRun, data: RowIterators, evaluated: int | None = None, **parts: Any) -> None:
        super().__init__(data=data, **parts)
        self.task, self.rows, self._evaluated = task, data, evaluated

    def train(self, finished: int) -> int:
        if self._evaluated is None:
            return super().train(finished)
        self.measure(self._evaluated)
        self.log.close()
        return 0

    def evaluates_after(self, iteration: int) -> bool:
        return super().evaluates_after(iteration) or self._ends_epoch(iteration)

    def saves_after(self, iteration: int) -> bool:
        return super().saves_after(iteration) or self._ends_epoch(iteration)

    def evaluate(self, iteration: int, split: str = "valid") -> None:
        """Log the validation loss every ``--eval-interval``, and the accuracy after an epoch or the last iteration."""
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
        when = f"iteration {iteration}" if epoch is None else f"epoch {epoch:g}"
        with self.log.paused():
            correct = [self._correct(number) for number in range(len(self.task.validation))]
        rows = [len(table.rows) for table in self.task.validation]
        names = [str(table.path) for table in self.task.validation]
        if len(names) > 1:
            names, correct, rows = [*names, "overall"], [*correct, sum(correct)], [*rows, sum(rows)]
        metrics = {} if epoch is None else {"epoch": epoch}
        metrics["validation_accuracy"] = correct[-1] / rows[-1]
        for name, right, count in zip(names, correct, rows, strict=True):
            self.log.info(f"  {when} | {name} | accuracy {right / count:.2%} ({right} of {count})")
            if name != names[-1]:
                metrics[f"validation_accuracy/{name}"] = right / count
        self.log.record(iteration, metrics)

    def _ends_epoch(self, iteration: int) -> bool:
        return due(iteration, self.task.iterations_per_epoch)

    def _correct(self, number: int) -> int:
        """Number of correctly classified rows of validation file ``number``, on every rank."""
        batches, train, module = self.rows.file_batches(number), self.run.train, self.engine.module
        what = f"classifying {self.task.validation[number].path}"
        loss_fn, module.loss_fn = module.loss_fn, _correct_answers  # the engine counts instead of computing the loss
        try:
            means = [
                eval_batch(self.engine, batches, self.hooks).item()
                for _ in self.log.counting(self.rows.global_batches(number), what)
            ]
        finally:
            module.loss_fn = loss_fn
        return sum(round(mean * (train.global_batch_size // train.micro_batch_size)) for mean in means)


class FineTuning(Program):
    """Program that trains the classifier of a task, or with ``--epochs 0`` measures its accuracy."""

    length_flag, evaluation_flag = "--epochs", "--epochs 0"

    def __init__(self, task: TaskRun) -> None:
        self._task = task
        self._pretrained: SavedRun | None = None
        self._evaluated: int | None = None

    def begin(self, run: RunConfig, saved: SavedRun | None) -> None:
        if saved is None and self._task.pretrained is not None:
            self._pretrained = select_checkpoint(self._task.pretraining(run))
        if self.only_evaluates(run):
            if saved is None:
                raise CheckpointError(
                    f"--load {run.checkpoint.load} holds no checkpoint to evaluate: train first, or name another folder"
                )
            self._evaluated = saved.iteration

    def only_evaluates(self, run: RunConfig) -> bool:
        return self._task.epochs == 0

    def describe(self, run: RunConfig) -> str:
        return _describe(self._task, run.model.classes)

    def load_weights(self, engine: Engine, run: RunConfig, layout: ParallelLayout) -> Loaded:
        saved = self._pretrained
        return Loaded(0, (load_pretrained(engine, run, layout, saved),)) if saved else FRESH

    def data(self, run: RunConfig, layout: ParallelLayout, skipped: Sequence[range]) -> RowIterators:
        return RowIterators(run, layout, self._task, skipped)

    def trainer(self, **parts: Any) -> EpochTrainer:
        return EpochTrainer(task=self._task, evaluated=self._evaluated, **parts)


def finetune(task: TaskRun, callbacks: Sequence[Callback]) -> int:
    """Train ``task`` with ``pretraining.train``. Returns the exit code of the process."""
    return train(task.run, callbacks, FineTuning(task))


def _describe(task: TaskRun, classes: Sequence[str]) -> str:
    """Lines for the log about tables, labels and epochs of the task."""
    lines = [f"> task      {task.name}: {', '.join(classes)}"]
    for kind, tables in (("train", task.training), ("valid", task.validation)):
        for table in tables:
            skipped = f"; {table.skipped:,} skipped, with another number of columns" if table.skipped else ""
            lines.append(f"> {kind:9} {table.path}: {counted(len(table.rows), 'row')}{skipped}")
    lines.append(f"> epochs    {task.epochs:g} of {counted(task.iterations_per_epoch, 'iteration')}")
    return "\n".join(lines)


def _correct_answers(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    """The sum of the weights of correctly classified samples; used in place of the loss."""
    labels, weights = targets
    return (weights * (logits.argmax(-1) == labels)).sum()
