"""Training of adapters from a checkpoint without them: the same on every layout, resumed on any, and merged."""

import shutil
from pathlib import Path

import pytest
import torch
from support.programs import read_metrics

from megatron.checkpoint.tracker import newest
from megatron.tools.convert.load_and_save import lazy_weights

SETTINGS = (
    "--batch-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --clip-grad 0.1"
).split()
LORA = "--finetune --lora-rank 4 --lora-alpha 8 --checkpoint-activations --train-iters 5 --save-interval 3".split()
LAYOUTS = {
    "tp2": "--model-parallel-size 2 --sequence-parallel --zero-stage 1",
    "dp2": "--zero-stage 2",
    "tp2-zbh1-offload": "--model-parallel-size 2 --sequence-parallel --pipe-parallel-size 1 --pipeline-schedule zbh1"
    " --zero-stage 1 --offload-optimizer cpu",
}
CHAIN = [
    ("--model-parallel-size 2 --sequence-parallel --zero-stage 1", 1e-5),
    ("--zero-stage 3 --offload-optimizer cpu", 1e-5),
    ("--zero-stage 3 --offload-optimizer cpu", 1e-5),  # without a conversion
    ("--pipe-parallel-size 2 --pipeline-schedule dualpipev --batch-size 1", 1e-5),
    # The tied embedding is frozen on both stages.
    ("--pipe-parallel-size 2 --bf16 --zero-stage 1 --grad-accum-dtype fp32", 5e-3),
]
"""Layouts that run an iteration each, resuming from the one before; and bounds of losses and gradient norms."""


@pytest.fixture(scope="module")
def base(train_in_ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of the whole model."""
    folder = tmp_path_factory.mktemp("base")
    return train_in_ranks.into_folder(folder, 1, *SETTINGS, "--train-iters", 2, "--zero-stage", 1)


@pytest.fixture(scope="module")
def alone(train_in_ranks, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metrics of adapters that one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    return train_in_ranks.into_folder(folder, 1, *SETTINGS, "--load", base / "checkpoint", *LORA)


def losses(folder: Path) -> list[float]:
    """Losses and gradient norms of all iterations."""
    lines = [line for line in read_metrics(folder / "metrics") if "lm_loss" in line]
    return [line[name] for line in lines for name in ("lm_loss", "grad_norm")]


def test_adapters_train_alike_on_every_layout(
    train_in_ranks, base: Path, alone: Path, programs, tmp_path: Path
) -> None:
    lora = [*SETTINGS, "--load", base / "checkpoint", *LORA]
    for name, flags in LAYOUTS.items():
        found = train_in_ranks.into_folder(tmp_path / name, 2, *lora, *flags.split())
        assert losses(found) == pytest.approx(losses(alone), rel=1e-4), name
    before, after = (dict(lazy_weights(newest(folder / "checkpoint"))) for folder in (base, tmp_path / "tp2"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items()), "the base is frozen"
    assert all(after[name].abs().max() > 0 for name in after.keys() - before.keys())
    assert len(after) - len(before) == 4 * 2 * 4

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "tp2", resumed)
    shutil.rmtree(resumed / "checkpoint" / newest(resumed / "checkpoint").tag)
    again = [*SETTINGS, *LORA[1:], *LAYOUTS["tp2"].split(), "--load", resumed / "checkpoint"]
    train_in_ranks(2, *again, "--metrics-file", resumed / "again")
    expected = [line["lm_loss"] for line in read_metrics(tmp_path / "tp2" / "metrics") if "lm_loss" in line]
    assert [line["lm_loss"] for line in read_metrics(resumed / "again") if "lm_loss" in line] == expected[3:]

    output, other = tmp_path / "merged", tmp_path / "of universal"
    tool, folder = "tools/convert_checkpoint.py", tmp_path / "tp2" / "checkpoint"
    programs.warm(1, tool, "merge-lora", folder, "--output", output).ok()
    programs.warm(1, tool, "to-universal", folder).ok()
    programs.warm(1, tool, "merge-lora", f"{newest(folder).path}_universal", "--output", other).ok()
    plain, again = (dict(lazy_weights(newest(place))) for place in (output, other))
    assert plain.keys() == again.keys() and all(plain[name].equal(again[name]) for name in plain)
    assert plain.keys() == before.keys()
    name = "3.mlp.dense_4h_to_h"
    added = 2 * after[f"{name}.lora.B"] @ after[f"{name}.lora.A"]
    torch.testing.assert_close(plain[f"{name}.weight"], before[f"{name}.weight"] + added)


def test_any_layout_resumes_adapters_of_any_other(train_in_ranks, base: Path, alone: Path, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    for number, (flags, _) in enumerate(CHAIN):
        source = ["--load", chain / "checkpoint"] if number else ["--load", base / "checkpoint", "--finetune"]
        words = [*SETTINGS, *LORA[1:], *flags.split(), *source, "--save-interval", 1, "--exit-interval", 1]
        train_in_ranks.into_folder(chain, 2, *words)
    found, expected = losses(chain), losses(alone)
    assert len(found) == 2 * len(CHAIN)
    for number, (flags, bound) in enumerate(CHAIN):
        pair = slice(2 * number, 2 * number + 2)
        assert found[pair] == pytest.approx(expected[pair], rel=bound), flags
    before, after = (dict(lazy_weights(newest(folder / "checkpoint"))) for folder in (base, chain))
    assert all(torch.equal(after[name], weight.bfloat16()) for name, weight in before.items()), "the base is frozen"
