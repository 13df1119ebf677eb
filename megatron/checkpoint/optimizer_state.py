"""The step count of Adam, which each implementation keeps in a form and a place of its own.

torch's Adam has a tensor for each parameter, DeepSpeed's a number for each parameter, and apex's FusedAdam a number for
each group of parameters. The moments have the same names in all of them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def optimizer_name(optimizer: Optimizer) -> str:
    """The implementation of ``optimizer``, such as ``torch AdamW`` or ``apex FusedAdam``."""
    return f"{_package(optimizer)} {type(optimizer).__name__}"


def accept_any_adam(optimizer: Optimizer) -> None:
    """Let ``optimizer`` load the state of any other implementation of Adam.

    torch's would raise KeyError: 'step' for a state of apex's, and apex's would count from 0 again for one of torch's.
    """
    optimizer.register_load_state_dict_pre_hook(in_form_of)


def in_form_of(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state ``saved`` by any implementation of Adam, in the form of ``optimizer``.

    Without a step count it stays as it is.
    """
    groups = [dict(group) for group in saved["param_groups"]]
    state = {number: dict(values) for number, values in saved["state"].items()}
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        numbered = zip(group["params"], current["params"], strict=True)
        states = [(state[number], parameter) for number, parameter in numbered if number in state]
        counts = [values["step"] for values, _ in states if "step" in values]
        of_group = group.pop("step", None)
        count = counts[0] if counts else of_group  # DeepSpeed's FusedAdam has one in the group, too, which is always 0
        if count is None:
            continue
        if _counts_by_group(optimizer):
            group["step"] = int(count)
        for values, parameter in states:
            own = values.pop("step", count)
            if not _counts_by_group(optimizer):
                values["step"] = _count(optimizer, parameter, own)
    return {**saved, "param_groups": groups, "state": state}


def set_step(optimizer: Optimizer, parameter: Tensor, steps: float) -> None:
    """Set the step count of ``parameter``."""
    if _counts_by_group(optimizer):
        for group in optimizer.param_groups:
            group["step"] = int(steps)
    else:
        optimizer.state[parameter]["step"] = _count(optimizer, parameter, steps)


def _count(optimizer: Optimizer, parameter: Tensor, steps: float | Tensor) -> int | Tensor:
    if _package(optimizer) != "torch":
        return int(steps)
    # Fused kernels read it on the device of the weights.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.tensor(float(steps), device=parameter.device if on_device else "cpu")


def _counts_by_group(optimizer: Optimizer) -> bool:
    return _package(optimizer) == "apex"


def _package(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.split(".")[0]
