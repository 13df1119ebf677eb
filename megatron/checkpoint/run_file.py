"""``run.json`` of a checkpoint: layout, settings and full configuration of the run that saved it. No torch here.

``describe`` makes its content, and ``SavedRun`` gives access to it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from megatron.checkpoint.sample_history import Segment, extended, read_history
from megatron.checkpoint.saved_layout import SavedLayout, layout_keys
from megatron.common.errors import CheckpointError, shown
from megatron.common.reading import type_problem
from megatron.config import DataConfig, ModelConfig, RunConfig, TrainConfig, sections
from megatron.config.fields import field_problems
from megatron.config.positions import ROTATION
from megatron.data.fingerprint import is_chat_template
from megatron.model.architectures import GPT2
from megatron.model.huggingface import model_title

RUN_FILE = "run.json"
_REMOVED = ("flex_attention", "images_per_sample", "next_tokens", "scaled_upper_triang_masked_softmax_fusion")
"""Former fields of ModelConfig that are ignored, since no weight depends on them."""
_EARLY_SCHEDULE = {"start_lr": "--lr", "min_lr": "--min-lr", "decay_style": "--lr-decay-style"}
_KINDS = {
    "iteration": int,
    "consumed_samples": int,
    "consumed_tokens": int,
    "left_out_samples": list[tuple[int, int]],
    "ledger": list[Segment],
    "layout": dict[str, Any],
    "settings": dict[str, Any],
    "schedule": dict[str, Any],
    "lr_scheduler": dict[str, Any],
    "optimizer": str,
    "has_optimizer": bool,
    "has_rng": bool,
    "config": dict[str, dict[str, Any]],
}
"""The types of the values of ``run.json``."""
_OPTIMIZER = re.compile(r"\w{1,64} \w{1,64}")
"""Package and class."""


def checked_description(tree: Any, where: str) -> dict[str, Any]:
    """The content of a ``run.json``, with defaults for data settings that its version did not have.

    Raises CheckpointError with a line that starts with ``where`` for each invalid value.
    """
    if not isinstance(tree, dict) or not tree.keys() >= {"iteration", "layout", "config"}:
        raise CheckpointError(f"{where} does not describe a training run")
    problems = [
        f"{key}: {problem}"
        for key, kind in _KINDS.items()
        if key in tree and (problem := type_problem(kind, tree[key]))
    ]
    if not problems:
        problems += [f"{key} is negative" for key in _KINDS if type(tree.get(key)) is int and tree[key] < 0]
        layout = {name: value for name, key in layout_keys().items() if (value := tree["layout"].get(key)) is not None}
        problems += field_problems(SavedLayout, layout)
        problems += [
            f"layout has no {entry.metadata['key']}"
            for entry in fields(SavedLayout)
            if entry.default is MISSING and entry.type is int and entry.name not in layout
        ]
        for name, kind in sections().items():
            has_ranges = kind in (ModelConfig, DataConfig, TrainConfig)
            problems += field_problems(kind, tree["config"].get(name, {}), ranges=has_ranges)
        problems += [] if "model" in tree["config"] else ["config has no model"]
        name = tree.get("optimizer", "torch AdamW")
        problems += [] if _OPTIMIZER.fullmatch(name) else [f"optimizer is {shown(name)}, which is no name of one"]
        # Only versions before the ledger saved no settings to compare.
        problems += ["settings are missing"] if "ledger" in tree and not tree.get("settings") else []
        problems += [
            f"{name} in schedule is no number"
            for name, value in tree.get("schedule", {}).items()
            if name.endswith(_LENGTHS) and type_problem(float | None if "wsd" in name else float, value)
        ]
        problems += [
            f"{name} in {part} is {value}, which is no number"
            for part in ("settings", "schedule")
            for name, value in tree.get(part, {}).items()
            if isinstance(value, float) and not isfinite(value)
        ]
        problems += _contradictions(tree["config"])
    if problems:
        raise CheckpointError(f"{where}: {problem}" for problem in problems)
    return {**tree, "config": {**tree["config"], "data": {**asdict(DataConfig()), **tree["config"].get("data", {})}}}


def _contradictions(config: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Values of the right type that are contradictory or impossible, or settings of another form."""
    optimizer = config.get("ds_config", {}).get("optimizer", {})
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("params", {}), dict):
        yield "the optimizer in ds_config is not an object"
    model, template = config.get("model", {}), config.get("data", {}).get("chat_template")
    if model.get("architecture", GPT2.name) == GPT2.name:
        names = ("encoder_num_layers", "vision_num_layers")
        yield from (f"{name} is {model[name]}, and {GPT2.name} has no encoder" for name in names if model.get(name))
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        yield from (f"{name} is 0, and {GPT2.name} has some" for name in sizes if model.get(name, 1) == 0)
    if template and not is_chat_template(template):
        yield "chat_template is not as it was saved"


_LENGTHS = ("-iters", "-samples")
"""Ends of the names of lengths in the schedule."""


@dataclass(frozen=True)
class SavedRun:
    """A complete checkpoint: its path and the content of its ``run.json``."""

    folder: Path
    tag: str
    description: Mapping[str, Any]
    """The content of ``run.json``."""
    newer_problems: tuple[str, ...] = ()
    """Problems of newer checkpoints in the folder, which cannot be loaded."""

    @property
    def warnings(self) -> list[str]:
        """A line for each newer checkpoint of the folder that is skipped."""
        return [f"{problem}; taking {self.tag}" for problem in self.newer_problems]

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
        """The layout of the checkpoint's files."""
        return SavedLayout.from_json(self.description["layout"])

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's state was saved."""
        return bool(self.description.get("has_optimizer"))

    @property
    def is_converted(self) -> bool:
        """Whether it has weights only, as tools/convert_checkpoint.py writes them."""
        return not (self.iteration or self.has_optimizer)

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
        """The fields of the run's ModelConfig. The architecture is GPT-2 if an early version did not save one."""
        saved = self.config["model"].items()
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in saved if key not in _REMOVED}
        return {"architecture": GPT2.name} | values

    @property
    def skipped_samples(self) -> tuple[range, ...]:
        """Samples that training skips, in order."""
        return tuple(range(start, stop) for start, stop in self.description.get("left_out_samples", ()))

    @property
    def lr_schedule(self) -> dict[str, Any]:
        """The learning-rate schedule in use, or what is known: early versions saved the flags, which may be ignored."""
        is_ignored = self.config.get("optim", {}).get("use_checkpoint_lr_scheduler")
        flags = {} if is_ignored else self.description.get("schedule", {})
        early = {name: flags[flag] for name, flag in _EARLY_SCHEDULE.items() if flag in flags}
        return self.description.get("lr_scheduler", early)

    @property
    def history(self) -> tuple[Segment, ...]:
        """The sample history of the run. Raises CheckpointError if it cannot be read."""
        return read_history(self.description, str(self.path))

    def full_model_config(self) -> ModelConfig:
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

    ``skipped_samples`` are in order; ``history`` is the sample history of the checkpoint that the run resumed.
    """
    samples = run.train.consumed_samples(iteration)
    return {
        "iteration": iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * run.data.seq_length,
        "left_out_samples": [[span.start, span.stop] for span in skipped_samples],
        "ledger": [asdict(segment) for segment in extended(history, run, iteration)],
        "model": model_title(run.model),
        "layout": SavedLayout.from_run(run).to_json(),
        "settings": settings_of(run),
        "schedule": schedule_of(run),
        "has_optimizer": not run.checkpoint.no_save_optim,
        "has_rng": not run.checkpoint.no_save_rng,
        "config": asdict(run),
    }


_EXPERT_FIELDS = """moe_router_topk moe_router_pre_softmax moe_router_load_balancing_type moe_aux_loss_coeff
    moe_z_loss_coeff moe_router_dtype moe_expert_capacity_factor""".split()
_LAYER_FIELDS = """pre_tokens openai_gelu layernorm_epsilon apply_residual_connection_post_layernorm
    lora_dropout""".split()
_IMAGE_FIELDS = """image_token_id image_fit vision_layernorm_epsilon vision_feature_layer
    vision_feature_select_strategy vision_lr_mult projector_lr_mult""".split()


def settings_of(run: RunConfig) -> dict[str, Any]:
    """The settings that determine the samples and the computation of ``run``, except the learning rate."""
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
        **formulas_of(run.model),
        **(_flags(run.model, *_EXPERT_FIELDS) if run.model.has_experts else {}),
        **_flags(run.optim, "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
        **_flags(run.optim, *(name for name in vars(run.optim) if name.startswith(f"{run.optim.optimizer}_"))),
    }


def formulas_of(model: ModelConfig) -> dict[str, Any]:
    """The settings that determine what layers compute, such as the base of RoPE, but no shapes."""
    kind = ("position_embedding_type",) if model.has_rotary_embedding else ()
    return _flags(model, *kind, *ROTATION, *_LAYER_FIELDS, *(_IMAGE_FIELDS if model.vision_num_layers else ()))


def schedule_of(run: RunConfig) -> dict[str, Any]:
    """The settings that determine the learning rate of each iteration; lengths are in iterations or samples."""
    optim = run.optim
    unit = "samples" if run.train.batches.varies else "iters"
    wsd = {"--lr-wsd-decay-style": optim.lr_wsd_decay_style, f"--lr-wsd-decay-{unit}": optim.wsd_decay_steps(run.train)}
    return {
        **_flags(optim, "lr", "min_lr", "lr_decay_style", "classic_lr_decay"),
        f"--lr-decay-{unit}": optim.decay_steps(run.train),
        f"--lr-warmup-{unit}": optim.warmup_steps(run.train),
        **(wsd if optim.lr_decay_style == "WSD" else {}),
    }


def _flags(config: object, *names: str) -> dict[str, Any]:
    """Values of the fields ``names`` of ``config``, by flag."""
    return {"--" + name.replace("_", "-"): getattr(config, name) for name in names}
