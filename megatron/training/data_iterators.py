"""Data iterators: this rank's micro-batches for training and evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.checkpoint.collective_errors import on_all_ranks, on_rank_0
from megatron.config import RunConfig
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.data import SPLITS
from megatron.data.datasets import (
    BlendedDataset,
    Datasets,
    build_datasets,
    sample_at,
    split_samples,
    with_skipped,
)
from megatron.data.image_dataset import ImageDataset
from megatron.data.loader import (
    Batch,
    MicroBatches,
    batches,
    image_batch,
    masked_lm_batch,
    next_token_batch,
    sft_batch,
    span_batch,
)
from megatron.data.sft_dataset import SFTDataset
from megatron.data.splits import Samples
from megatron.model.architectures import architecture_of
from megatron.model.embedding import has_segments
from megatron.ops.packed_attention import keep_on_host
from megatron.parallel.layout import ParallelLayout


def weighted(
    micro_batches: Iterator[Batch], accumulated: Iterable[int], group: ProcessGroup, *, masks: bool
) -> Iterator[Batch]:
    """Scale the loss masks of ``micro_batches`` so that DeepSpeed's average is the mean over all unmasked tokens.

    DeepSpeed averages over the micro-batches of an iteration and over the data-parallel ranks of ``group``. If
    micro-batches have different numbers of unmasked tokens (``masks``), the average of their means is not the mean over
    all tokens; so each token is weighted with 1 / (number of unmasked tokens in the global batch). Micro-batches, on
    the device of ``group``, have loss masks [b, s], or [b] with one label a sample; an iteration has ``accumulated``.
    """
    for number in accumulated:
        batch = list(islice(micro_batches, number))
        if not batch:
            return
        counted = torch.stack([loss_mask.sum() for _, (_, loss_mask, *_) in batch]).sum()
        if masks:
            dist.all_reduce(counted, group=group)
        else:
            counted = counted * group.size()
        scale = number * group.size() / counted.clamp(min=1)
        for tokens, (labels, loss_mask, *others) in batch:
            yield Batch(tokens, (labels, loss_mask * scale, *others))


def weighted_by_micro_batch(micro_batches: Iterator[Batch]) -> Iterator[Batch]:
    """Scale the loss masks [b, s] so that the loss of each micro-batch is the mean over its unmasked tokens.

    DeepSpeed averages the per-micro-batch means. If micro-batches count different numbers of tokens, the result
    depends on how the global batch is split.
    """
    for tokens, (labels, loss_mask, *others) in micro_batches:
        yield Batch(tokens, (labels, loss_mask / loss_mask.sum().clamp(min=1), *others))


MANY_EPOCHS = 5
"""Number of epochs from which on ``describe`` warns: the model may memorize the documents."""


class DataIterators:
    """The data sets of a run and this rank's micro-batches. Which pipeline stages read data: see ``reads_data``.

    A subclass for other kinds of data overrides ``has``, ``_open`` and ``_to_batch``.
    """

    def __init__(self, run: RunConfig, layout: ParallelLayout, skipped_samples: Sequence[range] = ()):
        self._run, self._layout = run, layout
        self._reads = reads_data(run, layout)
        self.skipped_samples = skipped_samples
        self._splits: set[str] = set()
        """Splits that have data, known also on ranks that read none."""
        self._datasets = self._build()

    def has(self, split: str) -> bool:
        """Whether ``valid`` or ``test`` has any data."""
        return split in self._splits

    def describe(self) -> list[str]:
        """Lines for the log about SFT and image data sets: packing, epochs and empty image slots."""
        run, lines, images = self._run, list[str](), 0.0
        train, blend = self._datasets and self._datasets.train, run.data.blends["train"]
        parts = train.parts if isinstance(train, BlendedDataset) else [train]
        samples = split_samples(run.train, self.skipped_samples)["train"]
        for part, (share, _) in zip(parts, blend, strict=False):
            if isinstance(part, SFTDataset):
                epochs = float(share * samples / part.samples_per_epoch)
                lines.append(f"> sft       {part.describe()}; {epochs:.3g} epochs")
                if epochs >= MANY_EPOCHS:
                    lines.append(f"> warning: {epochs:.3g} epochs of {part.indexed.prefix} are many: see --epochs")
            if isinstance(part, ImageDataset):
                images += float(share) * part.images_per_sample * run.train.micro_batch_size
        if run.data.image_format and lines:
            lines.append(f"> images    {1 - images / run.model.image_slots:.1%} of the image slots are empty")
        return lines

    def training(self, finished: int) -> Iterator[Batch] | None:
        """Micro-batches of the iterations after ``finished``; None if this rank reads no data."""
        return self._batches("train", self._run.train.batches, finished, self.skipped_samples)

    def evaluation(self, split: str, earlier: int) -> Iterator[Batch] | None:
        """Micro-batches of ``valid`` or ``test`` after ``earlier`` evaluations; None if this rank reads no data."""
        train = self._run.train
        return self._batches(split, train.evaluation_batches, earlier * train.eval_iters)

    def skip(self, iterations: range) -> range:
        """Skip the samples of ``iterations`` from now on. Returns the skipped range of the shuffled sample stream."""
        consumed = self._run.train.consumed_samples
        ends = consumed(iterations.start - 1), consumed(iterations.stop - 1) - 1
        first, last = (sample_at(position, self.skipped_samples) for position in ends)
        self.skipped_samples = with_skipped(self.skipped_samples, range(first, last + 1))
        self._datasets = self._build()  # training needs more samples now
        return range(first, last + 1)

    def _build(self) -> Datasets | None:
        """Open the data sets, after rank 0 (or one rank of each host) has built the index maps for the others.

        Raises UserError on all ranks if they cannot be built.
        """
        built: list[Datasets] = []

        def build() -> list[str]:
            if self._run.parallel.local_rank and self._run.data.no_shared_disk:
                return []
            built.append(self._open())
            splits = {split: getattr(built[0], split) for split in SPLITS}
            for dataset in splits.values():
                if dataset is not None:  # a wrong setting often shows in the first samples
                    dataset.take(range(min(self._run.train.micro_batch_size, len(dataset))))
            return [split for split in SPLITS if splits[split] is not None]

        if self._run.data.no_shared_disk:
            splits = on_all_ranks(build)
            self._splits = set(on_rank_0(lambda: splits))
        else:
            self._splits = set(on_rank_0(build))
        if not self._reads:
            return None
        return built[0] if built else self._open()

    def _open(self) -> Datasets:
        run = self._run
        return build_datasets(
            run.data,
            split_samples(run.train, self.skipped_samples),
            vocab_size=run.model.vocab_size,
            seed=run.train.seed,
            masked_lm=bool(architecture_of(run.model).masked_lm),
        )

    def _batches(
        self, split: str, sizes: BatchSchedule, finished: int, skipped: Sequence[range] = ()
    ) -> Iterator[Batch] | None:
        if self._datasets is None:
            return None
        train, group = self._run.train, self._layout.data_group
        micro_batches = self._micro_batches(getattr(self._datasets, split), sizes, finished, skipped)
        if not (self._layout.is_first_stage or self._layout.is_last_stage):
            return micro_batches
        micro_batches = on_device(micro_batches)
        if train.loss_normalization == "micro-batch":
            return weighted_by_micro_batch(micro_batches)
        data = self._run.data
        masks = data.eod_mask_loss or data.sft or architecture_of(self._run.model).masked_lm is not False
        samples_together = train.micro_batch_size * group.size()
        accumulated = (sizes.size(iteration) // samples_together for iteration in count(finished + 1))
        return weighted(micro_batches, accumulated, group, masks=masks)

    def _micro_batches(
        self, dataset: Samples, sizes: BatchSchedule, finished: int = 0, skipped: Sequence[range] = ()
    ) -> Iterator[Batch]:
        """This rank's micro-batches of ``dataset`` after ``finished`` global batches, with unscaled loss masks."""
        train, group = self._run.train, self._layout.data_group
        numbered = MicroBatches(
            dataset,
            sizes=sizes,
            finished=finished,
            micro_batch_size=train.micro_batch_size,
            data_rank=group.rank(),
            data_size=group.size(),
            skipped=skipped,
            image_slots=self._run.model.image_slots if self._run.data.image_format else 0,
        )
        return batches(numbered, num_workers=self._run.data.num_workers, to_batch=self._to_batch)

    def _to_batch(self, rows: Any) -> Batch:
        run = self._run
        if architecture_of(run.model).is_encoder_decoder:
            return span_batch(rows, decoder_seq_length=run.data.decoder_seq_length)
        if architecture_of(run.model).masked_lm:
            return masked_lm_batch(rows)
        if run.data.image_format:
            return image_batch(rows, slots=run.model.image_slots)
        if run.data.sft:
            return sft_batch(rows)
        return next_token_batch(rows, eod_token=run.model.eod_token, eod_mask_loss=run.data.eod_mask_loss)


class ProvidedDataIterators(DataIterators):
    """Data iterators over data sets from a user's function, which every rank calls, rank 0 first."""

    def has(self, split: str) -> bool:
        """Whether ``valid`` or ``test`` has any data."""
        return getattr(self._datasets, split) is not None

    def _build(self) -> Datasets:
        built = self._open() if self._layout.rank == 0 else None
        dist.barrier()
        return built or self._open()

    def _open(self) -> Datasets:
        provider = architecture_of(self._run.model).provider
        samples = split_samples(self._run.train, self.skipped_samples)
        return Datasets(*provider.open(self._run, list(samples.values())))

    def _batches(
        self, split: str, sizes: BatchSchedule, finished: int, skipped: Sequence[range] = ()
    ) -> Iterator[Batch] | None:
        if not self._reads:
            return None
        return on_device(self._micro_batches(getattr(self._datasets, split), sizes, finished, skipped))

    def _to_batch(self, rows: Any) -> Batch:
        return architecture_of(self._run.model).provider.batch(rows)


def reads_data(run: RunConfig, layout: ParallelLayout) -> bool:
    """Whether this rank reads data: on the first and the last stage, and on others to know the documents' boundaries.

    Stages between them read no images.
    """
    needs_boundaries = has_segments(run.model) and not architecture_of(run.model).reads_images
    return layout.is_first_stage or layout.is_last_stage or needs_boundaries


def data_iterators(run: RunConfig, layout: ParallelLayout, skipped_samples: Sequence[range] = ()) -> DataIterators:
    """The data iterators that the architecture of ``run`` requires. Every rank must call it."""
    kind = DataIterators if architecture_of(run.model).provider is None else ProvidedDataIterators
    return kind(run, layout, skipped_samples)


def on_device(micro_batches: Iterator[Batch]) -> Iterator[Batch]:
    """``micro_batches`` on this rank's GPU, copied asynchronously from pinned memory; unchanged on CPU."""
    if get_accelerator().device_name() != "cuda":
        return micro_batches
    device = get_accelerator().current_device_name()

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    def input_to_device(tensor: Tensor) -> Tensor:
        is_image = tensor.dtype == torch.uint8  # large, and used only on the device
        return to_device(tensor) if is_image else keep_on_host(to_device(tensor), tensor)

    return (
        Batch(
            input_to_device(tokens) if isinstance(tokens, Tensor) else tuple(map(input_to_device, tokens)),
            tuple(map(to_device, targets)),
        )
        for tokens, targets in micro_batches
    )
