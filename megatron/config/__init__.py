"""The configuration of a run: frozen dataclasses, created once from the command line. Imports no torch.

Each field made with ``flag(...)``, or a kind of it such as ``count(...)``, is a command-line flag with its help,
aliases and choices; ``megatron.cli.parser`` builds the argument parser from these fields. Fields made with
``derived(...)`` have no flag: their values follow from other fields or from the environment. Every field holds its
*resolved* value, after flags and JSON file are merged.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron.config.data import DataConfig
from megatron.config.fields import derived, flag
from megatron.config.memory import ActivationConfig, PrecisionConfig, ZeroConfig
from megatron.config.model import ModelConfig, default_ffn_hidden_size
from megatron.config.output import CheckpointConfig, LoggingConfig, ObserveConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run. Equal values mean equal runs."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    zero: ZeroConfig = ZeroConfig()
    activation: ActivationConfig = ActivationConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    observe: ObserveConfig = ObserveConfig()
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """The finished DeepSpeed config."""
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Flags that a program has added (``extra_args_provider`` of ``pretrain``), by their names in argparse."""
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Flags given by the user, name to value: a settings file with these values repeats the run."""

    def with_image_slots(self, slots: int) -> "RunConfig":
        """This run with ``--images-per-micro-batch`` (default: ``slots``) image slots if its model reads images."""
        if not self.model.vision_num_layers:
            return self
        slots, samples = self.model.images_per_micro_batch or slots, self.train.micro_batch_size
        return dataclasses.replace(self, model=dataclasses.replace(self.model, image_slots=slots, text_samples=samples))

    @property
    def log_interval(self) -> int:
        """``--log-interval``; by default the largest of 1, 2, 5, 10, 20, 50 and 100 that logs 30 iterations or more."""
        if self.logging.log_interval is not None:
            return self.logging.log_interval
        return max(
            interval for interval in (1, 2, 5, 10, 20, 50, 100) if interval <= max(1, self.train.train_iters // 30)
        )

    @property
    def coalesces_grad_reduction(self) -> bool:
        """Whether ranks hold unsharded gradients until the end of a step, with ``--zero-coalesce-grad-reduction``.

        A step of a single micro-batch accumulates nothing.
        """
        return self.zero.zero_coalesce_grad_reduction and self.train.gradient_accumulation_steps > 1

    @property
    def gradient_bucket(self) -> int | None:
        """Gradient elements that ZeRO 1 and 2 reduce at a time over the data-parallel ranks; None for all at once.

        The default is Megatron-LM's: large enough for the bandwidth of the links, regardless of the number of ranks.
        """
        ranks = self.parallel.data_parallel_size * self.parallel.sequence_ranks
        if self.zero.zero_stage not in (1, 2) or self.zero.offloads_optimizer or ranks <= 1:
            return None
        return int(self.zero.zero_reduce_bucket_size) or max(40_000_000, 1_000_000 * ranks)

    @property
    def overlaps_grad_reduce(self) -> bool:
        """Whether ranks reduce gradients during the backward pass, unless --no-overlap-grad-reduce.

        Off with --tiled-mlp, where a weight gets several gradients in one backward pass, with ZB-H1 and ZB-V, which
        compute weight gradients after the backward pass, and with an offloaded optimizer in a pipeline.
        """
        is_split = self.parallel.pipeline_schedule in ("zbh1", "zbv")
        is_later = self.parallel.uses_pipeline and (is_split or self.zero.offloads_optimizer)
        return self.zero.zero_overlap_comm is not False and not (self.model.tiled_mlp or is_later)

    @property
    def overlaps_param_gather(self) -> bool:
        """Whether ranks gather weights at ZeRO 1 and 2 in the forward pass, unless --no-overlap-param-gather."""
        return self.zero.overlap_param_gather is not False

    def is_logged(self, iteration: int) -> bool:
        """Whether the metrics of ``iteration`` are logged. The last iteration always is.

        Without ``--log-interval`` the first five iterations are logged, too. If a resumed run has less than half of a
        log interval left, it is merged with the next interval: the mean of a few losses would look like a spike.
        """
        is_early = self.logging.log_interval is None and 0 < iteration <= 5
        has_enough_losses = iteration - self.train.resumed_after >= self.log_interval / 2
        is_due = iteration % self.log_interval == 0 and has_enough_losses
        return is_early or is_due or iteration == self.train.train_iters


@cache
def sections() -> dict[str, type]:
    """The dataclasses that a RunConfig consists of, by field name."""
    types = {field.name: field.type for field in dataclasses.fields(RunConfig)}
    return {name: kind for name, kind in types.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


@cache
def _flags() -> dict[str, tuple[str, dataclasses.Field]]:
    """The section and the field of each flag. The names of fields are unique across sections."""
    places = ((name, field) for name, section in sections().items() for field in dataclasses.fields(section))
    return {field.name: (name, field) for name, field in places if "flag" in field.metadata}


def flag_value(run: RunConfig, name: str) -> Any:
    """The value in ``run`` of the field ``name``, which must have a flag."""
    return getattr(getattr(run, _flags()[name][0]), name)


@cache
def flag_fields() -> dict[str, dataclasses.Field]:
    """The fields of all sections that have a flag, by name."""
    return {name: field for name, (_, field) in _flags().items()}
