"""What a run may change when it goes on from a checkpoint, and what it may not. No torch here.

The layout may: another one is converted. What the run computes may not, unless ``--override`` says so, and the
shape of the model never.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config import RunConfig
from megatron.config.errors import CheckpointError
from megatron.model.architectures import GPT2
from megatron.parallel.pipeline.partition import layers_per_chunk

_SHAPE_FIELDS = (
    "architecture",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)
_NAMES = {"architecture": "the model", "vocab_size": "the vocabulary's size"}
_SIZES = {"TP": "--model-parallel-size", "PP": "--pipe-parallel-size", "DP": "data-parallel size"}
_OPTIMIZER_FIELDS = ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")
_HASH_SHOWN = 12
"""Digits of a hash that a message shows."""


def layout_of(run: RunConfig) -> dict[str, Any]:
    """How the state of ``run`` lies on ranks, and so in files."""
    return {
        "--model-parallel-size": run.parallel.model_parallel_size,
        "--pipe-parallel-size": run.parallel.pipe_parallel_size,
        "--ds-sequence-parallel-size": run.parallel.ds_sequence_parallel_size,
        "data-parallel size": run.parallel.data_parallel_size,
        "--zero-stage": run.zero.zero_stage,
        "--offload-optimizer": run.zero.offload_optimizer,
        "--cpu-torch-adam": run.zero.cpu_torch_adam,
        "precision": run.precision.dtype,
        **_order(run),
        **_stages(run),
    }


def _order(run: RunConfig) -> dict[str, Any]:
    """What decides on the order of parameters in the files of ZeRO."""
    settings = run.ds_config.get("zero_optimization", {})
    return {
        "--zero-round-robin-gradients": run.zero.zero_round_robin_gradients,
        **{name: settings.get(name) for name in ("parameter_alignment", "sub_group_size")},
    }


def _stages(run: RunConfig) -> dict[str, Any]:
    """How the layers lie on pipeline stages: the files of a stage's optimizer hold what that stage holds."""
    if not run.parallel.uses_pipeline:
        return {}
    layers = ", ".join(map(str, layers_per_chunk(run)))
    return {"--pipeline-schedule": run.parallel.pipeline_schedule, "the partition into stages": layers}


def settings_of(run: RunConfig) -> dict[str, Any]:
    """What decides on which samples ``run`` trains and what it makes of them, the learning rate apart."""
    train, data, model = run.train, run.data, run.model
    return {
        "the content of --data-path": data.data_hash,
        "the proportions of the blend": data.proportions,
        "the tokenizer's content": data.tokenizer_hash,
        "--split": data.split,
        "--seq-length": data.seq_length,
        "--global-batch-size": train.global_batch_size,
        "--seed": train.seed,
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "--eod-mask-loss": data.eod_mask_loss,
        "--mask-prob": data.mask_prob,
        "--short-seq-prob": data.short_seq_prob,
        "--loss-normalization": train.loss_normalization,
        "--attention-dropout": model.attention_dropout,
        "--hidden-dropout": model.hidden_dropout,
        **{_flag(name): getattr(run.optim, name) for name in _OPTIMIZER_FIELDS},
    }


def schedule_of(run: RunConfig) -> dict[str, Any]:
    """What decides on the learning rate of each iteration."""
    optim = run.optim
    schedule = {
        "--lr": optim.lr,
        "--min-lr": optim.min_lr,
        "--lr-decay-style": optim.lr_decay_style,
        "--lr-decay-iters": optim.decay_iters(run.train),
        "--lr-warmup-iters": optim.warmup_iters(run.train),
    }
    if optim.lr_decay_style == "WSD":
        schedule |= {
            "--lr-wsd-decay-style": optim.lr_wsd_decay_style,
            "--lr-wsd-decay-iters": optim.lr_wsd_decay_iters,
        }
    return schedule


def short_layout(description: Mapping[str, Any]) -> str:
    """The saved layout in a few words."""
    layout = description["layout"]
    names = dict(_SIZES)
    if layout["--ds-sequence-parallel-size"] > 1:
        names["SP"] = "--ds-sequence-parallel-size"
    names["ZeRO"] = "--zero-stage"
    return ", ".join([f"{name} {layout[key]}" for name, key in names.items()] + [layout["precision"]])


def loads_directly(description: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether DeepSpeed can take the checkpoint up as it is: each rank of ``run`` finds files of its own."""
    stage, config = run.zero.zero_stage, run.checkpoint
    # In bf16 without ZeRO the pipeline engine looks for the optimizer's partitions in a file that has none.
    is_lost = run.precision.bf16 and stage == 0 and run.parallel.uses_pipeline
    # At ZeRO 3 it takes weights alone from whatever tag ``latest`` names, by a pickle that may run code.
    is_unsafe = stage == 3 and (config.finetune or config.no_load_optim)
    return description["layout"] == layout_of(run) and not (is_lost or is_unsafe)


def has_same_ranks(description: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether each rank of ``run`` computes what it computed before, and so can go on with its random streams."""
    ours, theirs = layout_of(run), description["layout"]
    names = (*_SIZES.values(), "--ds-sequence-parallel-size", *_stages(run))
    return all(ours[name] == theirs.get(name) for name in names)


def behind(description: Mapping[str, Any], run: RunConfig) -> RunConfig:
    """``run`` at the sample at which the saved one stopped: iterations do not tell, if the batch was another."""
    if run.checkpoint.finetune:
        return run
    ahead = description["consumed_samples"] - description["iteration"] * run.train.global_batch_size
    return replace(run, train=replace(run.train, samples_ahead=ahead))


def changes(description: Mapping[str, Any], place: Path, run: RunConfig) -> list[str]:
    """A line for each setting that needs ``--override``, or needed it if it were not given."""
    if run.checkpoint.finetune:
        return []
    known = {name: value for name, value in settings_of(run).items() if value != ""}
    lines = _differences(known, description.get("settings", {}), place)
    if run.optim.use_checkpoint_lr_scheduler or run.optim.override_lr_scheduler:
        return lines
    return lines + _differences(schedule_of(run), description.get("schedule", {}), place)


def check_fit(description: Mapping[str, Any], place: Path, run: RunConfig) -> None:
    """The same model, the run it was, and the state that the flags ask for.

    Args:
        description: what ``run.json`` of the checkpoint says.
        place: the checkpoint's folder, as messages name it.

    Raises:
        CheckpointError: with a line for each thing that differs and may not.
    """
    config = run.checkpoint
    model = {"architecture": GPT2.name, **description["config"]["model"]}  # GPT-2 was once the only one
    shape = {_flag(name): getattr(run.model, name) for name in _SHAPE_FIELDS}
    saved_shape = {_flag(name): model.get(name) for name in _SHAPE_FIELDS}
    messages = [f"{line}: load a model of the same shape" for line in _differences(shape, saved_shape, place)]
    if not config.override:
        advice = "give --override to go on with another value, or --finetune to begin anew"
        messages += [f"{line}: {advice}" for line in changes(description, place, run)]
    if not loads_directly(description, run) and (run.zero.uses_nvme or "nvme" in _offload(description)):
        messages += [
            f"{line}: state on NVMe is resumed on the layout it was saved on"
            for line in _differences(layout_of(run), description["layout"], place)
        ]
    if not (config.finetune or config.no_load_optim):
        messages += _optimizer_messages(description, place, run)
    needs_rng = has_same_ranks(description, run) and not (config.finetune or config.no_load_rng)
    if needs_rng and not description.get("has_rng"):
        messages.append(f"{place} was saved with --no-save-rng: add --no-load-rng or --finetune")
    if messages:
        raise CheckpointError(messages)


def _optimizer_messages(description: Mapping[str, Any], place: Path, run: RunConfig) -> list[str]:
    if not description.get("has_optimizer"):
        return [f"{place} was saved with --no-save-optim: add --no-load-optim or --finetune"]
    ours, theirs = (_optimizer(config) for config in (run.ds_config, description["config"].get("ds_config", {})))
    if ours == theirs:
        return []
    return [f"the optimizer is {ours}, but {theirs} in {place}: add --no-load-optim or --finetune"]


def _optimizer(ds_config: Mapping[str, Any]) -> str:
    """Kind of an optimizer by its state: AdamW keeps what Adam keeps."""
    return str(ds_config.get("optimizer", {}).get("type", "Adam")).lower().replace("adamw", "adam")


def _offload(description: Mapping[str, Any]) -> list[Any]:
    zero = description["config"].get("zero", {})
    return [zero.get("offload_optimizer"), zero.get("offload_param")]


def _flag(field: str) -> str:
    return _NAMES.get(field, "--" + field.replace("_", "-"))


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], place: Path) -> list[str]:
    return [
        f"{name} is {_shown(ours[name])}, but {_shown(theirs[name])} in {place}"
        # What only one of both has is of another engine, or of another version of this program.
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]


def _shown(value: Any) -> str:
    is_hash = isinstance(value, str) and len(value) == 64
    return value[:_HASH_SHOWN] if is_hash else str(value)
