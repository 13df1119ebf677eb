"""The optimizers that a DeepSpeed config may name, and the parameters each takes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.ds_config.keys import AMOUNT, BETAS, BOOL, Keys
from megatron.given import Given

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


def optimizer_problems(run: RunConfig, file: Mapping[str, Any], given: Mapping[str, Given]) -> list[str]:
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
        problems.append(f"optimizer {name} needs a GPU, and this host shows none: use AdamW")
    for field, param in (("adam_beta1", "betas"), ("adam_beta2", "betas"), ("adam_eps", "eps")):
        if field in given and param not in optimizer.params:
            problems.append(f"{given[field].source} has no effect on optimizer {name}: remove it")
    return problems
