"""An architecture of one spec and one list of layers, nothing else changed: training, resharding, planning, tools."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_lines import CUDA, SMALL
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.cli import parse_run
from megatron.config import RunConfig
from megatron.tools.command_line import read_architecture

PROGRAM = Path(__file__).parents[1] / "support" / "toy_pretrain.py"
LAYOUT = ["--model-parallel-size", "2", "--pipe-parallel-size", "2"]


@pytest.fixture(scope="module")
def toy():
    """Its spec, read from the entry script; later tests find no trace of it."""
    from megatron.model.spec import ARCHITECTURES

    path = list(sys.path)
    yield read_architecture(PROGRAM)
    del ARCHITECTURES["Toy"]
    sys.path[:] = path


def train(programs: Programs, processes: int, *arguments: str | Path) -> None:
    common = "--train-iters 4 --lr-decay-iters 4 --batch-size 2 --log-interval 1 --eval-iters 0 --global-batch-size 8"
    common += " --attention-dropout 0 --hidden-dropout 0"
    words = [*TINY_MODEL, *programs.data_arguments, *common.split(), *map(str, arguments)]
    programs.warm(processes, PROGRAM, *words).ok()


def test_layouts_agree_and_a_checkpoint_changes_layout(programs: Programs, tmp_path: Path) -> None:
    one, four, resumed = (tmp_path / name for name in ("one.jsonl", "four.jsonl", "resumed.jsonl"))
    save = ["--save", tmp_path / "checkpoint", "--save-interval", "2", "--exit-interval", "2"]
    train(programs, 1, "--metrics-file", one)
    train(programs, 4, *LAYOUT, "--metrics-file", four, *save)
    train(programs, 2, "--zero-stage", "1", "--load", tmp_path / "checkpoint", "--metrics-file", resumed)
    losses = [line["lm_loss"] for line in read_metrics(one)]
    assert len(losses) == 4
    assert [line["lm_loss"] for line in read_metrics(four)] == pytest.approx(losses[:2], rel=1e-5)
    assert [line["lm_loss"] for line in read_metrics(resumed)] == pytest.approx(losses[2:], rel=1e-5)
    finished = programs.warm(
        1, "tools/inspect_checkpoint.py", "--program", PROGRAM, tmp_path / "checkpoint", "--json"
    ).ok()
    report = json.loads(finished.output)
    assert "toy_pretrain.py --load to resume" in report["loaded_by"] and "output" in finished.output


def settled(toy, words: str) -> RunConfig:
    small = SMALL.replace("--merge-file merges.txt", "--tokenizer-type WhitespaceTokenizer")
    run = parse_run([*small.split(), *words.split()], {**CUDA, "WORLD_SIZE": "8"}, toy)
    return replace(run, model=replace(run.model, vocab_size=100, padded_vocab_size=128))


@pytest.mark.parametrize("words", ["", "--model-parallel-size 2 --pipe-parallel-size 2", "--pipe-parallel-size 4"])
def test_the_planner_counts_the_built_model(toy, words: str) -> None:
    from support.built_stages import built_stage, fake_layout, first_rank_of_each_stage

    from megatron.tools.planning.memory import stage_memory

    run = settled(toy, words)
    for rank, memory in zip(first_rank_of_each_stage(run.parallel), stage_memory(run), strict=True):
        with fake_layout(run.parallel, rank) as layout:
            built = built_stage(run, layout)
        assert sum(parameter.numel() for parameter in built.parameters()) == memory.parameters


def test_the_planner_is_given_the_program(programs: Programs, tmp_path: Path) -> None:
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128"
    finished = programs.warm(
        1, "tools/plan.py", "--program", PROGRAM, "--device", "a100", "--devices", "4", "--global-batch-size", "64",
        "--vocab-size", "1000", *sizes.split(), "--emit", tmp_path / "plan",
    ).ok()  # fmt: skip
    assert "layouts: " in finished.output
    assert str(PROGRAM) in (tmp_path / "plan" / "run.sh").read_text()
