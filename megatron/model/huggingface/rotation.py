"""Reads and writes RoPE settings in Hugging Face's format (``rope_parameters``). No torch here."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.config.positions import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, ORIGINAL_LENGTH

_LLAMA3 = {
    "low_freq_factor": LOW_FREQUENCY_FACTOR,
    "high_freq_factor": HIGH_FREQUENCY_FACTOR,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
NAMES = {
    "rotary_base": "rope_theta",
    "rope_scaling_factor": "factor",
    "rotary_seq_len_interpolation_factor": "factor",
    **{f"yarn_{name}": name for name in (*_YARN, "original_max_position_embeddings")},
    "yarn_rotary_scaling_factor": "factor",
}
"""Fields of RoPE to their names in config.json."""


def read_rotation(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The RoPE fields: from ``rope_theta`` and ``rope_scaling`` of older files, or from ``rope_parameters``."""
    settings = {name: tree[name] for name in ("rope_scaling", "rope_parameters") if tree.get(name) is not None}
    wrong = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    if wrong:
        return {}, [f"{name} is {value!r}, and should be an object" for name, value in wrong.items()]
    given: Mapping[str, Any] = next(filter(None, settings.values()), {})
    base = given.get("rope_theta", tree.get("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    part = given.get("partial_rotary_factor", tree.get("partial_rotary_factor"))
    if part not in (None, 1):
        return {}, [f"partial_rotary_factor is {part!r}, and only 1 can be taken over"]
    if not isinstance(kind, str) or kind not in _EXTENSIONS:
        *names, last = map(repr, _EXTENSIONS)
        return {}, [f"rope_type is {kind!r}, and only {', '.join(names)} and {last} can be taken over"]
    factor = given.get("factor", 8.0 if kind == "llama3" else None)
    if kind != "default" and (type(factor) not in (int, float) or not factor >= 1):
        return {}, [f"factor is {factor!r}, and should be a number from 1 on"]
    fields, problems = _EXTENSIONS[kind](given, tree)
    return {"rotary_base": base, **fields}, problems


def _read_llama3(given: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems = [
        f"{name} is {given.get(name)!r}, and only {value:g} can be taken over"
        for name, value in _LLAMA3.items()
        if given.get(name) != value
    ]
    return {"use_rope_scaling": True, "rope_scaling_factor": given.get("factor", 8.0)}, problems


def _read_yarn(given: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The YaRN fields; an ``attention_factor`` in the file is expressed as ``mscale``."""
    original = tree.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = original or tree.get("max_position_embeddings")
    numbers = {name: given.get(name) or default for name, default in _YARN.items()}
    attention, rounds = given.get("attention_factor"), given.get("truncate", True)
    problems = [
        f"{name} is {value!r}, and should be a number from 0 on"
        for name, value in {**numbers, "attention_factor": 1.0 if attention is None else attention}.items()
        if type(value) not in (int, float) or not value >= 0
    ]
    if type(original) is not int or original < 1:
        problems.append(f"original_max_position_embeddings is {original!r}, and should be a whole number above 0")
    if problems:
        return {}, problems
    if attention is not None:
        log = math.log(given["factor"])
        if not (log and attention >= 1) and attention != 1:
            return {}, [f"attention_factor is {attention!r}, and can be 1, or more with a factor above 1"]
        numbers |= {"mscale": (attention - 1) / (0.1 * log) if log else 1.0, "mscale_all_dim": 0.0}
    elif not (given.get("mscale") and given.get("mscale_all_dim")):  # transformers takes both or neither
        numbers |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": given["factor"],
        "yarn_original_max_position_embeddings": original,
        "yarn_correction_range_round_to_int": bool(rounds),
        **{f"yarn_{name}": value for name, value in numbers.items()},
    }, []


_EXTENSIONS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[dict[str, Any], list[str]]]] = {
    "default": lambda given, tree: ({}, []),
    "llama3": _read_llama3,
    "linear": lambda given, tree: ({"rotary_seq_len_interpolation_factor": given["factor"]}, []),
    "yarn": _read_yarn,
}
"""``rope_type`` to a function (RoPE object, config.json) -> ModelConfig fields, messages."""


def write_rotation(config: ModelConfig) -> dict[str, Any]:
    """``rope_parameters`` of ``config``."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.use_rope_scaling:
        return rope | {"rope_type": "llama3", "factor": config.rope_scaling_factor, **_LLAMA3}
    if config.rotary_seq_len_interpolation_factor != 1:
        return rope | {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    if config.position_embedding_type != "yarn":
        return rope
    factor, scales = config.yarn_rotary_scaling_factor, (config.yarn_mscale, config.yarn_mscale_all_dim)
    assert factor is not None, "a rule requires it"
    rope |= {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
    }
    if all(scales):
        rope |= {"mscale": scales[0], "mscale_all_dim": scales[1]}
    elif scales != (1.0, 0.0):
        numerator, denominator = (0.1 * scale * math.log(factor) + 1 for scale in scales)
        rope["attention_factor"] = numerator / denominator
    return rope if config.yarn_correction_range_round_to_int else rope | {"truncate": False}
