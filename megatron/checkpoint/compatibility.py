"""Checks whether a run is compatible with the checkpoint that it resumes. No torch here.

The layout may differ: a checkpoint of another layout is resharded. Settings that change what the run computes may
differ only with ``--override``; the shape of the model must be the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_file import SavedRun, formulas_of, schedule_of, settings_of
from megatron.checkpoint.saved_layout import SavedLayout
from megatron.common.errors import CheckpointError
from megatron.config import ModelConfig, RunConfig
from megatron.model.spec import architecture_of

_SHAPE_FIELDS = {
    "architecture": "the model",
    **{
        name: "--" + name.replace("_", "-")
        for name in """num_layers encoder_num_layers decoder_num_layers hidden_size ffn_hidden_size num_attention_heads
        normalization qk_layernorm untie_embeddings_and_output_weights relative_attention_num_buckets num_experts
        moe_shared_expert_intermediate_size""".split()
    },
    "query_groups": "--num-query-groups",
    "head_size": "--kv-channels",
    "activation": "the activation of the MLP",
    "linear_bias": "the bias of linear layers",
    "qkv_bias": "the bias of queries, keys and values",
    "position_weights": "--position-embedding-type",
    "position_rows": "--max-position-embeddings",
    "vocab_size": "the vocabulary's size",
    "classes": "the list of classes",
    "expert_layers": "--moe-layer-freq",
    "expert_size": "--moe-ffn-hidden-size",
}
"""Fields and properties of ModelConfig that decide shapes, and their names in messages."""
_HEADS = "--num-attention-heads"
_DERIVED_FROM_HEADS = ("--num-query-groups", "--kv-channels")
"""Values that by default follow from the hidden size and the number of heads."""


def loads_directly(saved: SavedRun, run: RunConfig) -> bool:
    """Whether DeepSpeed can load ``saved`` without resharding: each rank of ``run`` finds the files it would write."""
    stage, config = run.zero.zero_stage, run.checkpoint
    # At ZeRO 3 DeepSpeed loads weights without optimizer from the tag in ``latest``, with a pickle that may run code.
    is_unsafe = stage == 3 and (config.finetune or config.no_load_optim)
    # DeepSpeed would give each rank the experts of the first rank.
    has_expert_files = run.parallel.expert_model_parallel_size > 1
    # Earlier versions ignored --zero-round-robin-gradients with these settings.
    adds_up_in_fp32 = saved.config.get("precision", {}).get("grad_accum_dtype") == "fp32"
    may_differ = stage == 1 and adds_up_in_fp32 and run.zero.zero_round_robin_gradients
    # The vocabulary may have been padded with another --make-vocab-size-divisible-by.
    rows = saved.config["model"].get("padded_vocab_size", run.model.padded_vocab_size)
    if is_unsafe or has_expert_files or may_differ or rows != run.model.padded_vocab_size:
        return False
    return saved.layout == SavedLayout.from_run(run) and not saved.is_converted  # whose weights may have another type


def has_same_ranks(saved: SavedRun, run: RunConfig) -> bool:
    """Whether each rank of ``run`` computes the same part as before, so that its random streams can continue."""
    return SavedLayout.from_run(run).has_same_ranks(saved.layout)


def at_saved_sample(saved: SavedRun, run: RunConfig) -> RunConfig:
    """``run`` starting at the sample after those that ``saved`` consumed, regardless of its global batch sizes."""
    if run.checkpoint.finetune:
        return run
    consumed = saved.description.get("consumed_samples")
    run = replace(run, train=replace(run.train, resumed_after=saved.iteration))
    if consumed in (None, run.train.consumed_samples(saved.iteration)):
        return run
    train = replace(run.train, start_iteration=saved.iteration, start_sample=consumed)
    if train.train_samples is not None:
        train = replace(train, train_iters=max(train.batches.iterations(train.train_samples), saved.iteration))
    return replace(run, train=train)


def overridden_settings(saved: SavedRun, run: RunConfig) -> list[str]:
    """A line for each setting that differs from ``saved`` and needs ``--override``."""
    if run.checkpoint.finetune:
        return []
    known = {name: value for name, value in settings_of(run).items() if value != ""}
    before = formulas_of(saved.full_model_config()) | _configured(known, saved) | saved.description.get("settings", {})
    known |= _update_rule(run.ds_config)
    before |= _update_rule(saved.config.get("ds_config", {}))
    lines = _differences(known, before, saved.path)
    if run.optim.use_checkpoint_lr_scheduler or run.optim.override_lr_scheduler:
        return lines
    return lines + _schedule_differences(saved, run)


def _configured(names: Iterable[str], saved: SavedRun) -> dict[str, Any]:
    """Those settings of ``names`` that are fields of the configuration of ``saved``."""
    sections = (saved.config.get(section, {}) for section in ("data", "train", "model", "optim"))
    values = {field: value for section in sections for field, value in section.items() if value not in (None, "")}
    fields = {name: _FIELDS.get(name, name[2:].replace("-", "_")) for name in names}
    return {name: values[field] for name, field in fields.items() if field in values}


_FIELDS = {"the content of --data-path": "data_hash", "the tokenizer's content": "tokenizer_hash"}
_UPDATE_RULE = {"adam_w_mode": True, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}
"""Settings that change an optimizer's update and that only DeepSpeed's JSON has, with DeepSpeed's defaults."""


def _update_rule(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = ds_config.get("optimizer", {})
    params = _UPDATE_RULE | optimizer.get("params", {})
    params["adam_w_mode"] = bool(params["adam_w_mode"]) or optimizer.get("type") != "Adam"  # else it is ignored
    return {name: params[name] for name in _UPDATE_RULE}


def _schedule_differences(saved: SavedRun, run: RunConfig) -> list[str]:
    """A line for each setting of the learning-rate schedule that differs, with the flag that a default follows from."""
    optim, before = run.optim, saved.description.get("schedule", {})
    unit = run.train.lr_unit.replace("iteration", "iter")
    causes = {}
    if optim.lr_decay_iters is None and optim.lr_decay_samples is None:
        causes[f"--lr-decay-{unit}s"] = f"by default that of {run.train.length_flag}"
    if optim.lr_warmup_iters is None and optim.lr_warmup_samples is None:
        causes[f"--lr-warmup-{unit}s"] = "--warmup is a fraction of the decay"
    lines = []
    done = saved.description.get("consumed_samples", 0) if unit == "sample" else saved.iteration
    is_decayed = done >= before.get(f"--lr-decay-{unit}s", math.inf)  # the old decay is over
    for name, value in schedule_of(run).items():
        for line in _differences({name: value}, before, saved.path):
            keeps = "" if is_decayed else f"; {name} {_shown(before[name])} keeps the old value"
            lines.append(f"{line} ({causes[name]}{keeps})" if name in causes else line)
    return lines


def check_compatible(saved: SavedRun, run: RunConfig) -> None:
    """Check that ``run`` can load ``saved``: same model, same settings, and all state that its flags require.

    Raises CheckpointError with a line for each difference that is not supported.
    """
    config, path = run.checkpoint, saved.path
    shape = {name: getattr(run.model, field) for field, name in _SHAPE_FIELDS.items()}
    saved_model = saved.full_model_config()
    saved_shape = {name: getattr(saved_model, field) for field, name in _SHAPE_FIELDS.items()}
    if shape["--hidden-size"] != saved_shape["--hidden-size"] or shape[_HEADS] != saved_shape[_HEADS]:
        shape = {name: value for name, value in shape.items() if name not in _DERIVED_FROM_HEADS}
    messages = [f"{line}: load a model of the same shape" for line in _differences(shape, saved_shape, path)]
    messages += _adapter_differences(saved, saved_model, run)
    is_same_model = not messages
    if not config.override:
        other = "another --save" if config.auto_resume else "--finetune"  # which exclude each other
        advice = f"give --override to continue with another value, or {other} to start a new run"
        messages += [f"{line}: {advice}" for line in overridden_settings(saved, run)]
    needs_optimizer = not (config.finetune or config.no_load_optim)
    if not loads_directly(saved, run):
        ours = SavedLayout.from_run(run)
        layout = _differences(ours.to_json(), saved.layout.to_json(), path)
        if not layout and ours != saved.layout:  # only one of them has a key, such as context parallelism
            layout = [f"{path} was saved on another layout"]
        reasons = _why_not_resharded(saved, run, needs_optimizer)
        messages += [f"{line}: {reason}" for reason in reasons for line in layout]
    if needs_optimizer:
        if saved.has_optimizer:
            optimizers = _optimizer(run.ds_config), _optimizer(saved.config.get("ds_config", {}))
            lines = _differences(*optimizers, path)
        else:
            lines = [f"{path} was saved with --no-save-optim"]
        messages += [f"{line}: add --no-load-optim or --finetune" for line in lines]
    needs_rng = has_same_ranks(saved, run) and not (config.finetune or config.no_load_rng)
    if needs_rng and not saved.has_rng:
        messages.append(f"{path} was saved with --no-save-rng: add --no-load-rng or --finetune")
    if messages and is_same_model and saved.is_converted and not config.auto_resume:
        messages = [f"{path} holds weights only, as tools/convert_checkpoint.py writes them: add --finetune"]
    if messages:
        raise CheckpointError(messages)


def _why_not_resharded(saved: SavedRun, run: RunConfig, needs_optimizer: bool) -> Iterator[str]:
    """Reasons why ``saved`` cannot be resharded to another layout."""
    if architecture_of(run.model).provider is not None:
        yield "a checkpoint of a model without a spec is resumed on the layout it was saved on"
    saved_zero = saved.config.get("zero", {})
    if run.zero.uses_nvme or "nvme" in (saved_zero.get("offload_optimizer"), saved_zero.get("offload_param")):
        yield "state on NVMe is resumed on the layout it was saved on"
    if run.optim.optimizer == "adafactor" and needs_optimizer:
        yield (
            "Adafactor, whose state is sums over rows and columns, is resumed on the layout it was saved on, "
            "or with --no-load-optim"
        )


def _adapter_differences(saved: SavedRun, saved_model: ModelConfig, run: RunConfig) -> list[str]:
    """A line for each difference between the LoRA adapters of ``saved`` and ``run``, unless ``run`` adds new ones."""
    if not saved_model.lora_rank and (run.checkpoint.finetune or not run.model.lora_rank):
        return []
    current, before = (
        {"--lora-rank": model.lora_rank, "the adapted layers": model.adapted, "--lora-alpha": model.lora_alpha}
        for model in (run.model, saved_model)
    )
    advice = "add --finetune" if not saved_model.lora_rank else "give the same, or merge it first with merge-lora"
    return [f"{line}: {advice}" for line in _differences(current, before, saved.path)]


def _optimizer(ds_config: Mapping[str, Any]) -> dict[str, str]:
    """The type of the optimizer, with Adam for AdamW, which has the same state."""
    kind = str(ds_config.get("optimizer", {}).get("type", "Adam"))
    return {"the optimizer": kind.lower().replace("adamw", "adam")}


def _differences(current: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> list[str]:
    return [
        f"{name} is {_shown(current[name])}, but {_shown(saved[name])} in {path}"
        # Names that only one of them has are from another engine, or another version of this program.
        for name in current
        if name in saved and current[name] != saved[name]
    ]


def _shown(value: Any) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)  # a hash is shortened
