"""The batches of a run: which samples each iteration and each evaluation takes, on this rank."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.config import RunConfig
from megatron.data.datasets import Datasets, Samples, build_datasets
from megatron.data.index_maps import sample_at, with_skipped
from megatron.data.loader import Batch, batches, masked_lm_batch, next_token_batch
from megatron.model.architectures import architecture_of
from megatron.parallel.layout import ParallelLayout


def weighted(micro_batches: Iterator[Batch], accumulated: int, group: ProcessGroup, *, masks: bool) -> Iterator[Batch]:
    """``micro_batches`` with their loss masks [b, s] scaled to weights.

    DeepSpeed averages over the ``accumulated`` micro-batches of an iteration and over the data
    ranks of ``group``. A mean of means is not the mean where ``masks`` leaves each with another
    number of tokens; so each token weighs one over the count in the whole global batch.
    """
    while batch := list(islice(micro_batches, accumulated)):
        counted = torch.stack([loss_mask.sum() for _, (_, loss_mask, *_) in batch]).sum()
        if masks:
            counted = counted.to(get_accelerator().current_device_name())
            dist.all_reduce(counted, group=group)
            counted = counted.cpu()
        else:
            counted = counted * group.size()
        scale = accumulated * group.size() / counted.clamp(min=1)
        for tokens, (labels, loss_mask, *others) in batch:
            yield Batch(tokens, (labels, loss_mask * scale, *others))


def weighted_by_micro_batch(micro_batches: Iterator[Batch]) -> Iterator[Batch]:
    """``micro_batches`` with their loss masks [b, s] scaled so that each one's loss is the mean over its own tokens.

    DeepSpeed's average of them is the classic mean of means: where micro-batches count different
    numbers of tokens, it depends on how the global batch is split.
    """
    for tokens, (labels, loss_mask, *others) in micro_batches:
        yield Batch(tokens, (labels, loss_mask / loss_mask.sum().clamp(min=1), *others))


class Feed:
    """The data sets of a run, and what this rank takes of them; nothing on a stage between others."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, left_out: Sequence[range] = ()):
        self._run, self._layout = run, layout
        self._reads = layout.is_first_stage or layout.is_last_stage
        self.left_out = left_out
        self._datasets = self._build()

    def training(self, finished: int) -> Iterator[Batch] | None:
        """Micro-batches of the iterations behind ``finished``; None where this rank reads nothing."""
        return self._batches("train", self._run.train.consumed_samples(finished), self.left_out)

    def evaluation(self, split: str, earlier: int) -> Iterator[Batch] | None:
        """Micro-batches behind those of ``earlier`` evaluations on the split ``valid`` or ``test``."""
        train = self._run.train
        return self._batches(split, earlier * train.eval_iters * train.global_batch_size)

    def leave_out(self, iterations: range) -> range:
        """Go past the samples of ``iterations`` from now on; which these are."""
        consumed = self._run.train.consumed_samples
        places = consumed(iterations.start - 1), consumed(iterations.stop - 1) - 1
        first, last = (sample_at(place, self.left_out) for place in places)
        self.left_out = with_skipped(self.left_out, range(first, last + 1))
        self._datasets = self._build()  # it has to reach further now
        return range(first, last + 1)

    def _build(self) -> Datasets | None:
        """What this rank reads. One rank builds index maps first, of all or of each host, and the others find them."""
        builds = not self._run.parallel.local_rank if self._run.data.no_shared_disk else self._layout.rank == 0
        built = self._open() if builds else None
        dist.barrier()
        if not self._reads:
            return None
        return built or self._open()

    def _open(self) -> Datasets:
        run, train = self._run, self._run.train
        last_sample = train.consumed_samples(train.train_iters) + sum(map(len, self.left_out))
        return build_datasets(
            run.data,
            masked_lm=architecture_of(run.model).masked_lm,
            vocab_size=run.model.vocab_size,
            global_batch_size=train.global_batch_size,
            train_iters=max(train.train_iters, -(-last_sample // train.global_batch_size)),
            eval_interval=train.eval_interval,
            eval_iters=train.eval_iters,
            seed=train.seed,
        )

    def _batches(self, split: str, first_sample: int, left_out: Sequence[range] = ()) -> Iterator[Batch] | None:
        if self._datasets is None:
            return None
        dataset: Samples = getattr(self._datasets, split)
        masked_lm = architecture_of(self._run.model).masked_lm
        data, train, group = self._run.data, self._run.train, self._layout.data_group
        micro_batches = batches(
            dataset,
            first_sample=first_sample,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            data_rank=group.rank(),
            data_size=group.size(),
            num_workers=data.num_workers,
            to_batch=TO_BATCH[masked_lm](self._run),
            skipped=left_out,
        )
        if train.loss_normalization == "micro-batch":
            return on_device(weighted_by_micro_batch(micro_batches))
        accumulated = train.gradient_accumulation_steps
        return on_device(weighted(micro_batches, accumulated, group, masks=data.eod_mask_loss or masked_lm))


def on_device(micro_batches: Iterator[Batch]) -> Iterator[Batch]:
    """``micro_batches`` on this rank's GPU, from pinned memory, so that nobody waits for the copy; or as they are."""
    if get_accelerator().device_name() != "cuda":
        return micro_batches
    device = get_accelerator().current_device_name()

    def copied(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return (Batch(copied(tokens), tuple(map(copied, targets))) for tokens, targets in micro_batches)


def _next_tokens(run: RunConfig) -> Callable[[Tensor], Batch]:
    return partial(next_token_batch, eod_token=run.model.eod_token, eod_mask_loss=run.data.eod_mask_loss)


def _masked_lm(run: RunConfig) -> Callable[[Tensor], Batch]:
    return masked_lm_batch


TO_BATCH: dict[bool, Callable[[RunConfig], Callable[[Tensor], Batch]]] = {
    False: _next_tokens,
    True: _masked_lm,
}
"""By ``masked_lm``: what makes a micro-batch of samples."""
