"""``run.json`` of a checkpoint: the layout, the settings and the full configuration of the run that saved it.

``describe`` makes its content, ``check_description`` checks it, ``SavedRun`` is what the rest of the program reads. No
torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from megatron.checkpoint.sample_history import Segment, extended, read_history
from megatron.checkpoint.saved_layout import SavedLayout, layout_keys
from megatron.common.errors import CheckpointError
from megatron.config import ModelConfig, RunConfig
from megatron.config.positions import ROTATION
from megatron.model.architectures import GPT2

RUN_FILE = "run.json"
_REMOVED = ("flex_attention",)
"""Fields of the model that earlier versions had, and on which no weight depends."""


@dataclass(frozen=True)
class SavedRun:
    """A complete checkpoint: where it is, and what its ``run.json`` contains."""

    folder: Path
    tag: str
    description: Mapping[str, Any]
    """The content of ``run.json``."""
    newer_problems: tuple[str, ...] = ()
    """What is wrong with the newer checkpoints of the folder, which cannot be loaded."""

    @property
    def path(self) -> Path:
        """The folder of the tag."""
        return self.folder / self.tag

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.description["iteration"]

    @cached_property
    def layout(self) -> SavedLayout:
        """The layout of its files."""
        return SavedLayout.from_json(self.description["layout"])

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's state was saved."""
        return bool(self.description.get("has_optimizer"))

    @property
    def has_rng(self) -> bool:
        """Whether the random number states were saved."""
        return bool(self.description.get("has_rng"))

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections of the run's configuration, as JSON."""
        return self.description["config"]

    @property
    def model(self) -> dict[str, Any]:
        """The fields of the run's ModelConfig. Without an architecture it is GPT-2, which was once the only one."""
        saved = self.config["model"].items()
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in saved if key not in _REMOVED}
        return {"architecture": GPT2.name} | values

    @property
    def skipped_samples(self) -> tuple[range, ...]:
        """Samples that training skips, in order."""
        return tuple(range(start, stop) for start, stop in self.description.get("left_out_samples", ()))

    @property
    def history(self) -> tuple[Segment, ...]:
        """The samples of its iterations. Raises CheckpointError if they cannot be read."""
        return read_history(self.description, str(self.path))

    def whole_model_config(self) -> ModelConfig:
        """The configuration of the saved model without parallelism and padding, in fp32."""
        try:
            config = ModelConfig(**self.model)
        except TypeError as error:
            raise CheckpointError(f"{self.path} was saved by another version: {error}") from None
        return replace(config, padded_vocab_size=config.vocab_size, dtype="fp32")


def describe(
    run: RunConfig, iteration: int, skipped_samples: Sequence[range] = (), history: Sequence[Segment] = ()
) -> dict[str, Any]:
    """The content of ``run.json`` for a checkpoint of ``run`` after ``iteration``.

    ``skipped_samples`` are in order; ``history`` is that of the checkpoint that the run resumed.
    """
    samples = run.train.consumed_samples(iteration)
    return {
        "iteration": iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * run.data.seq_length,
        "left_out_samples": [[span.start, span.stop] for span in skipped_samples],
        "ledger": [asdict(segment) for segment in extended(history, run, iteration)],
        "layout": SavedLayout.from_run(run).to_json(),
        "settings": settings_of(run),
        "schedule": schedule_of(run),
        "has_optimizer": not run.checkpoint.no_save_optim,
        "has_rng": not run.checkpoint.no_save_rng,
        "config": asdict(run),
    }


_OF_OPTIMIZER = {
    "sgd": ("sgd_momentum",),
    "muon": (
        "muon_momentum",
        "muon_nesterov",
        "muon_num_ns_steps",
        "muon_coefficient_type",
        "muon_scale_mode",
        "muon_extra_scale_factor",
        "muon_split_qkv",
    ),
}
"""Settings that only one optimizer has."""


_OF_EXPERTS = (
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_dtype",
    "moe_expert_capacity_factor",
)


def settings_of(run: RunConfig) -> dict[str, Any]:
    """The settings that decide which samples ``run`` trains on and what it computes, except the learning rate."""
    data = run.data
    return {
        "the content of --data-path": data.data_hash,
        "the proportions of the blend": data.proportions,
        "the tokenizer's content": data.tokenizer_hash,
        **_flags(data, "split", "seq_length"),
        "--global-batch-size": str(run.train.batches) if run.train.batches.varies else run.train.global_batch_size,
        **_flags(run.train, "seed"),
        **_flags(data, "sft", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        **_flags(data, "mask_prob", "short_seq_prob"),
        **(_flags(data, "decoder_seq_length", "vocab_extra_ids") if data.decoder_seq_length else {}),
        **(_flags(run.model, "relative_attention_max_distance") if run.model.has_relative_positions else {}),
        **_flags(run.train, "loss_normalization"),
        **_flags(run.model, "attention_dropout", "hidden_dropout"),
        **rotation_of(run.model),
        **(_flags(run.model, *_OF_EXPERTS) if run.model.has_experts else {}),
        **_flags(run.optim, "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
        **_flags(run.optim, *_OF_OPTIMIZER.get(run.optim.optimizer, ())),
    }


def rotation_of(model: ModelConfig) -> dict[str, Any]:
    """The settings that decide by which angles queries and keys are rotated; no weight depends on them."""
    kind = _flags(model, "position_embedding_type") if model.has_rotary_embedding else {}
    return kind | _flags(model, *ROTATION)


def schedule_of(run: RunConfig) -> dict[str, Any]:
    """The settings that decide the learning rate of each iteration; the lengths are counted as in the run."""
    optim = run.optim
    unit = "samples" if run.train.batches.varies else "iters"
    wsd = {"--lr-wsd-decay-style": optim.lr_wsd_decay_style, f"--lr-wsd-decay-{unit}": optim.wsd_decay_steps(run.train)}
    return {
        **_flags(optim, "lr", "min_lr", "lr_decay_style"),
        f"--lr-decay-{unit}": optim.decay_steps(run.train),
        f"--lr-warmup-{unit}": optim.warmup_steps(run.train),
        **(wsd if optim.lr_decay_style == "WSD" else {}),
    }


def _flags(config: object, *names: str) -> dict[str, Any]:
    """Values of some fields of ``config`` by their flags."""
    return {"--" + name.replace("_", "-"): getattr(config, name) for name in names}


def check_description(description: Any, file: Path) -> None:
    """Raises CheckpointError if the content of a ``run.json`` cannot describe a run: a part is missing, or of no sense.

    What other versions of this program add or leave out is no error.
    """
    if not isinstance(description, dict) or not _is_complete(description):
        raise CheckpointError(f"{file} does not describe a training run")
    _check_numbers(description, file)
    layout, model = description["layout"], description["config"]["model"]
    wrong = [
        key
        for name, key in layout_keys().items()
        if (key in layout or name in _SIZES)
        and not _fits(layout.get(key), _LAYOUT_TYPES[name])
        or type(layout.get(key)) is int
        and layout[key] < 0
    ]
    wrong += [
        entry.name for entry in fields(ModelConfig) if not _fits(model.get(entry.name, entry.default), entry.type)
    ]
    if wrong:
        raise CheckpointError(f"{file} has a value for {wrong[0]} that no run has")


def _is_complete(description: Mapping[str, Any]) -> bool:
    layout, config, iteration = (description.get(name) for name in ("layout", "config", "iteration"))
    optional = (description.get(name, {}) for name in ("settings", "schedule"))
    return (
        isinstance(layout, dict)
        and isinstance(config, dict)
        and "model" in config
        and all(isinstance(section, dict) for section in (*config.values(), *optional))
        and isinstance(config.get("ds_config", {}).get("optimizer", {}), dict)
        and type(iteration) is int
        and iteration >= 0
    )


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of the type of a field."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kind in (None, NoneType):
        return value is None
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple)
    return type(value) in (int, float) if kind is float else type(value) is kind


_SIZES = ("model_parallel_size", "pipe_parallel_size", "data_parallel_size", "zero_stage")
"""Parts of a layout that every version saves."""
_LAYOUT_TYPES: dict[str, Any] = {entry.name: entry.type for entry in fields(SavedLayout)}
_MOST_ITERATIONS, _MOST_SAMPLES = 2**40, 2**24
"""Iterations of a run, and samples in each of them: more than any run has."""


def _check_numbers(description: Mapping[str, Any], file: Path) -> None:
    """Raises CheckpointError if iteration, samples or tokens in a ``run.json`` cannot be those of a run."""
    iteration = description["iteration"]
    most = max(iteration, 1) * _MOST_SAMPLES
    limits = {"iteration": _MOST_ITERATIONS, "consumed_samples": most}
    for name, limit in limits.items():
        value = description.get(name, 0)
        if type(value) is not int or not 0 <= value <= limit:
            raise CheckpointError(f"{file} has {name} {repr(value)[:40]} at iteration {str(iteration)[:40]}")
    try:
        spans = [(start, stop) for start, stop in description.get("left_out_samples", ())]
    except (TypeError, ValueError):
        spans = [("", "")]
    if not all(type(place) is int and 0 <= place <= most for span in spans for place in span):
        raise CheckpointError(f"{file} has left_out_samples that are not ranges of samples")
