"""Layouts by their names; runs of one model on several of them, and what must be equal in them: metrics and weights."""

import re
from collections.abc import Callable, Collection, Sequence
from math import prod
from pathlib import Path

import pytest
from support.programs import read_metrics
from support.training import RankTraining

TOLERANCE = 1e-4
COMPARED = {"lm_loss", "grad_norm", "learning_rate", "validation_loss", "test_loss"}

SIZES = {
    "tp": "--model-parallel-size",
    "pp": "--pipe-parallel-size",
    "cp": "--context-parallel-size",
    "ulysses": "--ds-sequence-parallel-size",
    "dp": "",
}
"""Their product is the number of ranks."""
NUMBERS = {"zero": "--zero-stage", "ep": "--expert-model-parallel-size"}
SWITCHES = {
    "sp": "--sequence-parallel",
    "sbh": "--shape-order SBH",
    "overlap": "--tp-comm-overlap",
    "recompute": "--checkpoint-activations",
    "selective": "--recompute-granularity selective",
    "offload": "--offload-optimizer cpu",
    "in-place": "--gradient-accumulation-fusion",
    "documents": "--reset-attention-mask --reset-position-ids",
    "bf16": "--bf16",
    "fp16": "--fp16",
    **{name: f"--pipeline-schedule {name}" for name in ("1f1b", "interleaved", "zbh1", "zbv", "dualpipev")},
}


def layout(name: str, **more: str) -> tuple[int, str]:
    """The ranks and the flags of a layout such as ``tp2 pp2 sp zero1 --lr 1``; ``more`` are other words for flags."""
    ranks, flags = [], []
    for word in name.split():
        size = re.fullmatch(r"([a-z]+)(\d+)", word)
        if word in more or word in SWITCHES:
            flags.append(more.get(word) or SWITCHES[word])
        elif size and size[1] in SIZES:
            ranks.append(int(size[2]))
            flags += [f"{SIZES[size[1]]} {size[2]}"] if SIZES[size[1]] else []
        else:
            flags.append(f"{NUMBERS[size[1]]} {size[2]}" if size and size[1] in NUMBERS else word)
    return prod(ranks), " ".join(flags)


class LayoutRuns:
    """``runs(processes, flags)`` trains in a new folder, with metrics and a checkpoint in it."""

    def __init__(self, train: RankTraining, settings: Sequence[str], new_folder: Callable[[str], Path]):
        self._train, self._settings, self._new_folder = train, settings, new_folder
        self._references: dict[str, Path] = {}

    def __call__(self, processes: int, flags: str) -> Path:
        return self._train.into_folder(self._new_folder("layout"), processes, *self._settings, *flags.split())

    def on_one_process(self, flags: str = "") -> Path:
        """The run with these flags that others are compared with, trained when it is asked for first.

        Without micro-batches, unless the flags have them.
        """
        if flags not in self._references:
            self._references[flags] = self(1, f"--batch-size 8 {flags}")
        return self._references[flags]


def compare_runs(reference: Path, folder: Path, iterations: int, names: Collection[str] = COMPARED) -> list[dict]:
    """Fail unless all ``names`` in all lines of the metrics agree, and all weights; the lines found."""
    expected, found = read_metrics(reference / "metrics"), read_metrics(folder / "metrics")
    assert sum("lm_loss" in line for line in expected) == iterations
    compare_metrics(expected, found, names)
    assert any(line.get("grad_norm", 0) > 0.4 for line in expected), "clipping had nothing to do"
    assert not differing_weights(reference / "checkpoint", folder / "checkpoint")
    return found


def check_resumed(runs: LayoutRuns, saver: str, loader: str, after: int, flags: str = "") -> None:
    """A run saved on a layout, and continued on another one, has the losses of one process to the fifth digit.

    Moments show in the weights that the first step after the start makes.
    """
    saved = runs(*layout(f"{saver} {flags} --exit-interval {after}"))
    resumed, whole = runs(*layout(f"{loader} {flags} --load {saved / 'checkpoint'}")), runs.on_one_process(flags)
    expected = [line for line in read_metrics(whole / "metrics") if line["iteration"] > after]
    compare_metrics(expected, read_metrics(resumed / "metrics"))
    compare_metrics(expected, read_metrics(resumed / "metrics"), {"lm_loss"}, tolerance=1e-5)
    assert not differing_weights(whole / "checkpoint", resumed / "checkpoint")


def compare_metrics(
    expected: list[dict], found: list[dict], names: Collection[str] = COMPARED, tolerance: float = TOLERANCE
) -> None:
    """Fail unless both have the same lines, and equal values of ``names`` in them."""
    assert len(found) == len(expected) > 2
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & names:
            assert other[name] == pytest.approx(one[name], rel=tolerance), (one["iteration"], name)


def differing_weights(one: Path, other: Path) -> list[str]:
    """Names of the weights that differ between the newest checkpoints of two folders, brought together from all ranks.

    Adam divides by the root of the squared gradient, and so blows rounding up where a gradient is next to nothing.
    """
    import torch

    from megatron.checkpoint.tracker import newest
    from megatron.tools.convert.load_and_save import lazy_weights

    first, second = (dict(lazy_weights(newest(str(folder)))) for folder in (one, other))
    assert first.keys() == second.keys() and len(first) > 30
    return [name for name in first if not torch.allclose(first[name], second[name], rtol=TOLERANCE, atol=TOLERANCE)]
