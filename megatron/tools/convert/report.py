"""Reports of tools/inspect_checkpoint.py: properties and parameters of a checkpoint, or differences between two."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.run_file import RUN_FILE
from megatron.common.errors import one_line
from megatron.model.architectures import GPT2, T5, architecture_of
from megatron.model.huggingface import model_title
from megatron.tools.command_line import progress_bar
from megatron.tools.convert.full_model import SIZES
from megatron.tools.convert.inspection import FoundCheckpoint, read_config, read_description
from megatron.training.summary import layer_kinds

_GENERATE, _CONVERT = "tools/generate.py", "tools/convert_checkpoint.py"
_LOADERS = {
    "folder": (_GENERATE, f"{_CONVERT} merge, to-hf"),
    "tag": (_GENERATE, f"{_CONVERT} merge, to-hf"),
    "universal": ("DeepSpeed with load_universal", _GENERATE, f"{_CONVERT} merge, to-hf"),
    "safetensors": ("safetensors.torch.load_file", _GENERATE, f"{_CONVERT} to-hf"),
    "huggingface": ("{program} --load-hf", "transformers.{auto_class}", _GENERATE, f"{_CONVERT} from-hf"),
}
"""Programs, in addition to the training program, that load each kind of checkpoint."""
_AUTO_CLASSES = {GPT2.name: "AutoModelForCausalLM", T5.name: "AutoModelForSeq2SeqLM"}
"""Classes of transformers for the architectures that generate text."""


def describe_checkpoint(checkpoint: FoundCheckpoint) -> dict[str, Any]:
    """Properties of a checkpoint, from ``run.json`` or the header of merged weights, and the programs that load it."""
    description, config = read_description(checkpoint), read_config(checkpoint)
    known: dict[str, Any] = {"path": str(checkpoint.path), "kind": checkpoint.what}
    if checkpoint.kind == "folder" and checkpoint.saved:
        known["newest"] = checkpoint.saved.tag
        known["tags"] = sorted(file.parent.name for file in checkpoint.path.glob(f"*/{RUN_FILE}"))
    if description is not None:
        known |= {name: description.get(name) for name in ("iteration", "consumed_samples", "consumed_tokens")}
        is_merged, is_universal = checkpoint.kind == "safetensors", checkpoint.kind == "universal"
        has_optimizer = description.get("has_optimizer") and not is_merged
        has_rng = description.get("has_rng") and not (is_merged or is_universal)
        known["layout"] = description["layout"]
        known["holds"] = ["weights", *["the optimizer"] * bool(has_optimizer), *["random streams"] * bool(has_rng)]
    if config is not None:
        known["family"] = model_title(config)
        known["model"] = {label: getattr(config, name) for name, label in SIZES.items()}
        if config.query_groups != config.num_attention_heads:
            known["model"]["query groups"] = config.query_groups
        if config.head_size * config.num_attention_heads != config.hidden_size:
            known["model"]["head size"] = config.head_size
        if kinds := layer_kinds(config):
            known["kinds"] = kinds
    architecture = GPT2 if config is None else architecture_of(config)
    auto_class = _AUTO_CLASSES.get(architecture.name)
    known["loaded_by"] = [
        program.format(program=architecture.program, auto_class=auto_class or "AutoModelForPreTraining")
        for program in _LOADERS[checkpoint.kind]
        if auto_class or program != _GENERATE
    ]
    if description is not None and checkpoint.kind in ("folder", "tag"):
        how = "to resume" if description.get("has_optimizer") else "with --finetune, for it has no optimizer"
        via = "" if checkpoint.kind == "folder" else f", where {checkpoint.path.parent / 'latest'} names it"
        known["loaded_by"].insert(0, f"{architecture.program} --load {how}{via}")
    return known


_TITLES = {
    "newest": "newest",
    "tags": "checkpoints",
    "iteration": "iteration",
    "consumed_samples": "samples",
    "consumed_tokens": "tokens",
    "layout": "layout",
    "family": "model",
    "model": "sizes",
    "kinds": "layers",
    "holds": "contains",
    "versions": "versions",
    "whole": "complete",
    "loaded_by": "loaded by",
}


def heading(known: Mapping[str, Any]) -> str:
    """The properties of ``describe_checkpoint`` as lines of text, printed above the parameters."""
    lines = [f"{known['path']}: {known['kind']}"]
    lines += [f"  {title:12}{_as_text(known[name])}" for name, title in _TITLES.items() if known.get(name) is not None]
    return "\n".join(lines)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        # Settings that are off are left out; compared by identity, since 0 equals False.
        entries = {
            key: entry
            for key, entry in value.items()
            if not (entry is None or entry is False or entry == "none" or (key, entry) == ("--pipe-parallel-size", 0))
        }
        return ", ".join(
            one_line(f"{key.removeprefix('--').replace('-', ' ')} {entry}") for key, entry in entries.items()
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(one_line(str(entry)) for entry in value)
    return f"{value:,}" if isinstance(value, int) else one_line(str(value))


class Parameter(NamedTuple):
    """A parameter of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    """2-norm, computed in fp64."""

    @property
    def layer(self) -> str:
        """The first part of the name, which all parameters of a layer share."""
        return self.name.removeprefix("tied_modules.").split(".")[0]


def parameters(weights: Mapping[str, Tensor]) -> list[Parameter]:
    """The parameters of a checkpoint, in its order, with their norms."""
    measured = []
    for name, tensor in progress_bar(weights.items(), desc="measuring"):
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
        measured.append(Parameter(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), norm))
    return measured


def listing(measured: list[Parameter]) -> str:
    """A table with a line for each parameter and each layer."""
    rows = list(_rows(measured))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:{widths[0]}}  {shape:>{widths[1]}}  {dtype:{widths[2]}}  {norm}" for name, shape, dtype, norm in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _rows(measured: list[Parameter]) -> Iterator[tuple[str, str, str, str]]:
    yield "layer", "shape", "type", "norm"
    for layer, parameters_of_layer in groupby(measured, key=lambda parameter: parameter.layer):
        group = list(parameters_of_layer)
        yield layer, *_total(group)
        for parameter in group:
            name = parameter.name.removeprefix("tied_modules.").removeprefix(f"{layer}.")
            yield f"  {name}", " x ".join(map(str, parameter.shape)), parameter.dtype, f"{parameter.norm:.6g}"
    yield "all", *_total(measured)


def _total(group: list[Parameter]) -> tuple[str, str, str]:
    norm = math.sqrt(sum(parameter.norm**2 for parameter in group))
    return f"{sum(math.prod(parameter.shape) for parameter in group):,}", "", f"{norm:.6g}"


def parameters_as_json(known: Mapping[str, Any], measured: list[Parameter]) -> str:
    """Properties and parameters as JSON. A norm that is not finite is null."""
    listed = [row._asdict() | ({} if math.isfinite(row.norm) else {"norm": None}) for row in measured]
    return json.dumps({**known, "parameters": listed}, indent=2)


class Difference(NamedTuple):
    """The difference between a tensor of checkpoint a and the same tensor of checkpoint b."""

    name: str
    absolute: float
    """max |b - a|"""
    relative: float
    """max |b - a| / max |a|; infinite if a value is not finite."""
    note: str = ""
    """Why the tensors cannot be compared; empty if they can."""


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Difference]:
    """A difference for each tensor, in the order of ``first``, followed by tensors that only ``second`` has."""
    compared = [_difference(name, first[name], second.get(name)) for name in progress_bar(first, desc="comparing")]
    return compared + [
        Difference(name, math.inf, math.inf, "only in the second") for name in second if name not in first
    ]


def _difference(name: str, a: Tensor, b: Tensor | None) -> Difference:
    if b is None:
        return Difference(name, math.inf, math.inf, "only in the first")
    if a.shape != b.shape:
        return Difference(name, math.inf, math.inf, f"{list(a.shape)} and {list(b.shape)}")
    if a.equal(b) or not a.numel():
        return Difference(name, 0.0, 0.0)
    absolute = (b.double() - a.double()).abs().max().item()
    scale = a.double().abs().max().item()
    if not math.isfinite(absolute):
        return Difference(name, math.inf, math.inf, "values that are not finite")
    return Difference(name, absolute, absolute / scale if scale else absolute)


def differences_as_text(compared: list[Difference], tolerance: float) -> str:
    """A line for each tensor that differs by more than the tolerance, and a summary."""
    beyond = [difference for difference in compared if difference.relative > tolerance]
    width = max((len(difference.name) for difference in beyond), default=0)
    lines = [
        f"{name:{width}}  {note or f'absolute {absolute:.3g}, relative {relative:.3g}'}"
        for name, absolute, relative, note in beyond
    ]
    largest = max((difference.relative for difference in compared), default=0.0)
    lines.append(
        f"{len(compared) - len(beyond)} of {len(compared)} tensors are equal, largest relative difference {largest:.3g}"
    )
    return "\n".join(lines)


def differences_as_json(compared: list[Difference], tolerance: float) -> str:
    """The differences as JSON. An infinite one is null."""
    tensors = [
        {name: None if value == math.inf else value for name, value in difference._asdict().items()}
        for difference in compared
    ]
    return json.dumps({"tolerance": tolerance, "equal": are_equal(compared, tolerance), "tensors": tensors}, indent=2)


def are_equal(compared: list[Difference], tolerance: float) -> bool:
    """Whether no tensor differs by more than the tolerance."""
    return all(difference.relative <= tolerance for difference in compared)
