"""Checks the content of a checkpoint against the model and its optimizer, before any of it is copied.

Hashes show that a file is unchanged, not that it holds the state of this model and optimizer. An optimizer kernel would
read beyond the end of a moment that is smaller than its parameter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.version import Version
from torch import Tensor, nn

from megatron.checkpoint.checks import (
    Shape,
    check_numbers,
    check_outline,
    check_tensor,
    form_errors,
    outline,
    value_at,
    wrong,
)
from megatron.checkpoint.collective_errors import gathered_on_rank_0
from megatron.checkpoint.run_file import RUN_FILE, SavedRun
from megatron.checkpoint.sample_history import MOST_SAMPLES
from megatron.checkpoint.saved_files import PADDINGS, numbered_state
from megatron.checkpoint.stored import WEIGHT, State, is_flat
from megatron.common.checkpoint_folders import existing_rank_file
from megatron.common.errors import CheckpointError, shown
from megatron.engines.state import base_tensors, moment_names, optimizer_notified, rank_files

_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
"""Keys of the master weights in the optimizer files of ZeRO 1, 2 and 3."""
_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""Other keys that DeepSpeed loads from these files, in addition to the state of the base optimizer."""
CHECKPOINT_VERSION = 3.0
"""Megatron's version number of checkpoints with query-key-value rows in the order [heads, 3, head size]."""
_OLDEST = Version("0.3.17")
"""DeepSpeed's first version whose ZeRO files it loads."""
Steps = dict[int, Path]
"""Step counts of an optimizer, each with a file that has it."""


class Updates(NamedTuple):
    """The expected optimizer state of a parameter."""

    moments: Collection[str] = ()
    """Names of the moments; none if it may never have been updated."""
    most: int = 0
    """Maximum number of updates."""
    dtype: torch.dtype = torch.float32
    """Type of the moments, if it is not fp32."""


def check_state(place: object, name: str, state: State, shape: Shape, updates: Updates) -> int | None:
    """Check the ``state`` of a parameter. Returns its step count, if it has one, as with second moments it must.

    Raises CheckpointError unless weight and moments match ``shape`` and ``updates``.
    """
    if not state.keys() >= {*updates.moments}:
        raise wrong(
            place, f"the state of {name}", *(", ".join(sorted(of)) or "empty" for of in (state, updates.moments))
        )
    known = {WEIGHT, *updates.moments}
    shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
    for key, value in state.items():
        if key in known or is_flat(value):
            file, own = getattr(value, "path", place), getattr(value, "dtype", None)
            dtype = None if key == WEIGHT or own == updates.dtype else torch.float32
            check_outline(file, f"{name}.{key}", value, shapes.get(key, shape), dtype)
            if isinstance(value, Tensor):
                check_numbers(file, f"{name}.{key}", value)
    return _check_step(place, name, state, updates.most)


def _check_step(place: object, name: str, state: State, most: int) -> int | None:
    if not state.keys() & {"step", "exp_avg_sq"}:
        return None
    step = state.get("step")
    step = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(step, int | float) or isinstance(step, bool) or not 0 <= step <= most or step % 1:
        raise wrong(place, f"{name}.step", str(step), f"a number of updates, at most {most}")
    return int(step)


def check_numbering(place: Path, base: Mapping[str, Any], most: int) -> Steps:
    """Check the numbers of the parameters in the groups of an optimizer, and their step counts, which it returns."""
    numbers = [number for group in value_at(place, base, "param_groups") for number in group["params"]]
    count = max([len(numbers), *(number + 1 for number in base["state"] if isinstance(number, int))])
    if numbers != list(range(count)):
        raise wrong(place, "the numbers of the parameters in the groups", str(numbers), f"0 to {count - 1}")
    steps = {_check_step(place, f"state[{number}]", numbered_state(place, base, number), most) for number in numbers}
    return {step: place for step in steps if step is not None}


def check_loss_scale(place: object, state: Mapping[str, Any]) -> float:
    """The loss scale in the state of an optimizer, or 1. Raises CheckpointError unless it is a positive number."""
    if not isinstance(state, Mapping):
        raise wrong(place, "the state of the optimizer", outline(state), "a dict")
    scaler = state.get("loss_scaler", state)
    if not isinstance(source := getattr(scaler, "__dict__", scaler), Mapping):
        raise wrong(place, "the loss scaler", outline(scaler), "one of DeepSpeed")
    scale = source.get("cur_scale", 1)
    if not isinstance(scale, int | float) or not 0 < scale < inf:
        raise wrong(place, "the loss scale", str(scale), "a number above 0")
    return scale


def check_same(what: str, found: Iterable[Mapping[Any, Path]]) -> None:
    """Raise CheckpointError if numbers of an optimizer, each with a file that has it, differ."""
    places = {number: file for part in found for number, file in part.items()}
    if len(numbers := sorted(places)) > 1:
        file, other = places[numbers[0]], places[numbers[-1]]
        also = f" here and in {other.name}" if file != other else ""
        raise CheckpointError(f"{file}: the optimizer's {what} are {numbers}{also}, and should be equal")


def read_rank_files(
    engine: DeepSpeedEngine, saved: SavedRun, *, optimizer: bool, progress: bool, has_spec: bool
) -> dict[str, Any]:
    """Read and check the files that DeepSpeed loads on this rank. Returns their contents by name.

    Every rank must call it. Raises CheckpointError on all ranks if a file of any rank is damaged, or has names, shapes,
    types or numbers that do not match ``engine``. In a model without a spec some parameters may never have been
    updated.
    """
    contents: dict[str, Any] = {}
    sizes = {"mp_world_size": engine.mp_world_size}
    used_as, _ = engine.get_data_types()
    if engine.zero_optimization():
        sizes["dp_world_size"] = engine.dp_world_size

    def read() -> tuple[Steps, dict[float, Path]]:
        steps: Steps = {}
        scales: dict[float, Path] = {}
        applied = saved.iteration
        for file, weights, states in rank_files(engine, saved.path, optimizer=optimizer):
            with form_errors(path := existing_rank_file(file)):
                contents[path.name] = found = engine.checkpoint_engine.load(str(path))
                if "module" in found:
                    applied = check_counts(path, found, saved, progress=progress, **sizes)
                    if progress:
                        engine.lr_scheduler.chosen(value_at(path, found, "lr_scheduler"))
                for entry, expected in weights.items():
                    _check_weights(path, value_at(path, found, *filter(None, [entry])), expected)
                needed = [
                    (
                        tensor,
                        Updates(
                            moment_names(engine.basic_optimizer, tensor) if has_spec and applied else (),
                            applied,
                            tensor.dtype,
                        ),
                    )
                    for tensor in base_tensors(engine)
                ]
                for entry, expected in states.items():
                    scales[check_loss_scale(path, state := value_at(path, found, entry))] = path
                    steps |= _check_optimizer(path, state, expected, needed, used_as)
        return steps, scales

    def check(found: list[tuple[Steps, dict[float, Path]]]) -> None:
        if has_spec:
            check_same("step counts", [steps for steps, _ in found])
        check_same("loss scales", [scales for _, scales in found])

    with optimizer_notified(engine):
        gathered_on_rank_0(read, check)
    return contents


def check_counts(place: Path, found: Mapping[str, Any], saved: SavedRun, *, progress: bool, **more: int) -> int:
    """Check the counters in a rank's file against ``run.json`` and ``more``. Returns the number of applied iterations.

    With ``progress`` also the schedule of the learning rate, and its count, which a skipped iteration does not advance.
    """
    skipped, samples = (value_at(place, found, key) for key in ("skipped_steps", "global_samples"))
    applied = saved.iteration - skipped if type(skipped) is int else -1
    expected = {
        "iteration": saved.iteration,
        "consumed_samples": saved.description.get("consumed_samples"),
        "global_steps": saved.iteration,
        "checkpoint_version": CHECKPOINT_VERSION,
        **more,
    }
    for key, count in expected.items():
        if found.get(key, count) != count:
            raise wrong(place, key, repr(found[key]), str(count))
    if not 0 <= applied <= saved.iteration:
        number = f"a number of iterations, at most {saved.iteration}"
        raise wrong(place, "skipped_steps", repr(skipped), number)
    for name, value in saved.lr_schedule.items() if progress else ():
        if (own := value_at(place, found, "lr_scheduler", name)) != value:
            raise wrong(place, f"lr_scheduler.{name}", shown(own), f"{shown(value)} as in {RUN_FILE}")
    counted = value_at(place, found, "lr_scheduler", "num_iters") if progress else applied
    if type(counted) is not int or counted != applied:
        raise wrong(place, "lr_scheduler.num_iters", repr(counted), str(applied))
    if type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
        raise wrong(place, "global_samples", repr(samples), "a number of samples")
    return applied


def _check_optimizer(
    place: Path,
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    needed: Sequence[tuple[Tensor, Updates]],
    used_as: torch.dtype,
) -> Steps:
    """Check the optimizer state ``found`` of weights ``used_as``; ``needed`` has each tensor. Returns step counts."""
    for key in expected.keys() & _SCALING:
        # At ZeRO 1 and 2 a checkpoint of an earlier version may lack it.
        if (key in found or "fp32_flat_groups" in expected) and type(found[key]) is not type(expected[key]):
            raise wrong(place, key, type(found[key]).__name__, type(expected[key]).__name__)
    if "ds_version" in expected:
        if Version(version := value_at(place, found, "ds_version")) < _OLDEST:
            raise wrong(place, "ds_version", version, f"{_OLDEST} or later")
    if (paddings := found.get(PADDINGS)) not in (None, expected.get(PADDINGS)):
        raise wrong(place, PADDINGS, str(paddings), str(expected.get(PADDINGS)))
    for key in expected.keys() & _MASTERS:
        for number, weights in enumerate(expected[key]):
            own = value_at(place, found, key, number)
            check_outline(place, f"{key}[{number}]", own, weights.shape, weights.dtype)
            check_numbers(place, f"{key}[{number}]", own, used_as)
        if (count := len(found[key])) != len(expected[key]):
            raise wrong(place, key, f"{count} tensors", str(len(expected[key])))
    base, current = (
        one.get("base_optimizer_state") or one.get("optimizer_state_dict") or one for one in (found, expected)
    )
    numbers, ours = (
        [list(group["params"]) for group in value_at(place, one, "param_groups")] for one in (base, current)
    )
    if numbers not in (ours, [sum(ours, [])]):  # earlier versions saved Adagrad's groups as one
        raise wrong(place, "the numbers of the parameters in the groups", str(numbers), str(ours))
    if more := sorted(map(str, value_at(place, base, "state").keys() - {*sum(numbers, [])})):
        raise wrong(place, f"state[{more[0]}]", "there", "missing: there is no such parameter")
    steps = set()
    for number in sum(numbers, []):
        state, (tensor, updates) = numbered_state(place, base, number), needed[number]
        steps.add(check_state(place, f"state[{number}]", state, tensor.shape, updates))
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                continue
            # Optimizer kernels use the strides of the weight.
            own, ours = ([*compress(t.stride(), (size > 1 for size in t.shape))] for t in (value, tensor))
            if own != ours:
                raise wrong(place, f"state[{number}].{key}", f"of strides {own}", f"of {ours}")
    return {step: place for step in steps if step is not None}


def _check_weights(place: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check names and tensors. Buffers, such as masks, may have infinite values."""
    for name in sorted(expected.keys() ^ found.keys()):
        raise wrong(place, name, *(("missing", "there") if name in expected else ("there", "missing")))
    for name, tensor in expected.items():
        if isinstance(tensor, nn.Parameter):
            check_tensor(place, name, found[name], tensor.shape, tensor.dtype)
        elif isinstance(tensor, Tensor):
            check_outline(place, name, found[name], tensor.shape, tensor.dtype)
