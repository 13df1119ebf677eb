"""Settings that offload of the optimizer and of the weights have in common: two keys of a config, and one flag."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import ObserveConfig, ParallelConfig, RunConfig, ZeroConfig
from megatron.config.deepspeed_json.keys import AMOUNT, BETAS, BOOL, Keys
from megatron.config.fields import Provided

_ZERO = "zero_optimization"
_SECTIONS = ("offload_optimizer", "offload_param")
_SHARED = {"nvme_path": "nvme_path", "offload_pin_memory": "pin_memory"}
"""Field of the run -> key in both sections."""


def shared_offload_settings(file: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Field, section and key of each that a config file says. Where the sections differ, the last of them counts."""
    for field, key in _SHARED.items():
        for section in _SECTIONS:
            if file.get(_ZERO, {}).get(section, {}).get(key) is not None:
                yield field, section, key


def complete_offload(tree: dict[str, Any], zero: ZeroConfig) -> None:
    """Add what the flags say, and the file does not, to each section of ``tree`` that offloads something."""
    for section in _SECTIONS:
        device = getattr(zero, section)
        if device == "none":
            continue
        settings = tree[_ZERO][section]
        if device == "nvme":
            settings.setdefault("nvme_path", zero.nvme_path)
        if not zero.offload_pin_memory:
            settings.setdefault("pin_memory", False)


_SECTION, _KEYS = "pipeline", ("pipe_partitioned", "grad_partitioned")


def pipeline_problems(run: RunConfig, file: Mapping[str, Any]) -> list[str]:
    """A message for each key of a config file that asks for parts where only whole tensors can travel."""
    cause, section = _sends_whole(run.parallel), file.get(_SECTION, {})
    return [
        f"{_SECTION}.{key} true cannot be combined with {cause}: set it to false, or remove it"
        for key in _KEYS
        if cause and section.get(key)
    ]


def complete_pipeline(tree: dict[str, Any], parallel: ParallelConfig) -> None:
    """Switch the sending of parts off in ``tree`` where only whole tensors can travel."""
    if _sends_whole(parallel):
        tree.setdefault(_SECTION, {}).update(dict.fromkeys(_KEYS, False))


def _sends_whole(parallel: ParallelConfig) -> str | None:
    """The flag by which tensors travel whole, and its reason; None where parts will do."""
    if not parallel.uses_pipeline:
        return None
    if parallel.sequence_parallel:
        return "--sequence-parallel, by which no two tensor-parallel ranks send the same tensor"
    if parallel.uses_dualpipev:
        return f"--pipeline-schedule {parallel.pipeline_schedule}, whose engine sends whole tensors only"
    return None


SECTION = "flops_profiler"
FILE = "flops-profile.txt"


def profile_problems(observe: ObserveConfig, file: Mapping[str, Any]) -> list[str]:
    """What keeps flag and file from being brought together."""
    if observe.flops_profile_step is not None and SECTION in file:
        return [f"--flops-profile-step and {SECTION} in the JSON exclude each other: remove one"]
    return []


def complete_profile(tree: dict[str, Any], observe: ObserveConfig) -> None:
    """Write the profiler's section, where the flag asks for it. DeepSpeed counts steps from 0 on."""
    if observe.flops_profile_step is not None:
        tree[SECTION] = {
            "enabled": True,
            "profile_step": observe.flops_profile_step - 1,
            "output_file": str(Path(str(observe.profile_dir)) / FILE),
        }


_COMMON: Keys = {"lr": AMOUNT, "weight_decay": AMOUNT}
_ADAM: Keys = {
    **_COMMON,
    "betas": BETAS,
    "eps": AMOUNT,
    "torch_adam": BOOL,
    "fused": BOOL,
    "adam_w_mode": BOOL,
    "fp32_optimizer_states": BOOL,
}


class Optimizer(NamedTuple):
    """What one needs to know of an optimizer before it exists."""

    params: Keys
    tested_with_zero: bool = True
    """Whether DeepSpeed runs it under ZeRO without "zero_allow_untested_optimizer"."""
    needs_gpu: bool = False
    """Whether its only form without offload is a CUDA kernel."""


OPTIMIZERS: dict[str, Optimizer] = {
    "Adam": Optimizer(_ADAM),
    "AdamW": Optimizer(_ADAM),
    "Adagrad": Optimizer({**_COMMON, "eps": AMOUNT}),
    "Lamb": Optimizer(
        {**_COMMON, "betas": BETAS, "eps": AMOUNT, "max_coeff": AMOUNT, "min_coeff": AMOUNT, "bias_correction": BOOL},
        tested_with_zero=False,
        needs_gpu=True,
    ),
    "Lion": Optimizer({**_COMMON, "betas": BETAS}, needs_gpu=True),
    "SGD": Optimizer({**_COMMON, "momentum": AMOUNT}, tested_with_zero=False),
}
DEFAULT_OPTIMIZER = "AdamW"


def optimizer_name(text: str) -> str | None:
    """The key of OPTIMIZERS that ``text`` means, whatever its letters' case; None if there is none."""
    return next((name for name in OPTIMIZERS if name.lower() == text.lower()), None)


def optimizer_problems(run: RunConfig, file: Mapping[str, Any], given: Mapping[str, Provided]) -> list[str]:
    """A message for each way in which the optimizer that a config file names does not fit the run."""
    name = optimizer_name(file.get("optimizer", {}).get("type", DEFAULT_OPTIMIZER)) or DEFAULT_OPTIMIZER
    optimizer = OPTIMIZERS[name]
    problems = []
    if run.zero.zero_stage > 0 and not optimizer.tested_with_zero and not file.get("zero_allow_untested_optimizer"):
        problems.append(
            f"optimizer {name} is untested with ZeRO: use AdamW, --zero-stage 0, "
            'or "zero_allow_untested_optimizer": true'
        )
    if optimizer.needs_gpu and run.parallel.device == "cpu" and not run.zero.offloads_optimizer:
        problems.append(f"optimizer {name} needs a GPU, and this host has none: use AdamW")
    for field, param in (("adam_beta1", "betas"), ("adam_beta2", "betas"), ("adam_eps", "eps")):
        if field in given and param not in optimizer.params:
            problems.append(f"{given[field].source} has no effect on optimizer {name}: remove it")
    return problems
