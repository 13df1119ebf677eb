"""Whether a file of tensors contains what its name says.

A manifest shows that a file is the one that was saved, not that what was saved makes sense.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def structure_problem(name: str, content: Any) -> str | None:
    """Why a file called ``name`` cannot have this content; None if it can, or if its name is of no known kind."""
    for pattern, problem_of in _KINDS.items():
        if re.fullmatch(pattern, name):
            return problem_of(content)
    return None


def _layer_problem(content: Any) -> str | None:
    # A module may save a state of its own besides, of any type.
    if not isinstance(content, Mapping) or not all(
        isinstance(value, Tensor) or str(name).endswith("_extra_state") for name, value in content.items()
    ):
        return "it does not contain the weights of a layer"
    return None


def _model_problem(content: Any) -> str | None:
    if not isinstance(content, Mapping) or not isinstance(content.get("module"), Mapping | None):
        return "it does not contain the state of a model"
    return None


def _optimizer_problem(content: Any) -> str | None:
    if not isinstance(content, Mapping) or not isinstance(content.get("optimizer_state_dict"), Mapping):
        return "it does not contain the state of an optimizer"
    return None


def _random_problem(content: Any) -> str | None:
    """Why generators reject the states; they are tried on new ones."""
    try:
        random.Random().setstate(content["random_rng_state"])
        kind, keys, position, has_gauss, gauss = content["np_rng_state"]
        np.random.RandomState().set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.Generator().set_state(content["torch_rng_state"])
        states = [content["cuda_rng_state"], *content["rng_tracker_states"].values()]
        if all(isinstance(state, Tensor) and state.dtype == torch.uint8 for state in states):
            return None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RuntimeError):
        pass
    return "it does not contain random number states"


def _experts_problem(content: Any) -> str | None:
    states = content.values() if isinstance(content, Mapping) else [None]
    if not all(isinstance(state, Mapping) and isinstance(state.get("fp32"), Tensor) for state in states):
        return "it does not contain the states of experts"
    return None


_KINDS: dict[str, Callable[[Any], str | None]] = {
    r"layer_\d+-model_\d+-model_states\.pt": _layer_problem,
    r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt": _model_problem,
    r"\w*optim_states\.pt": _optimizer_problem,
    r"expert_rank_\d+_mp_rank_\d+_states\.pt": _experts_problem,
    r"rng_state_\d+\.pt": _random_problem,
}
"""Pattern of a name -> what is wrong with the content."""
