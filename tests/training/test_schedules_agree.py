"""Every pipeline schedule gives the losses, gradient norms and weights of one process, and resumes from another one."""

from pathlib import Path

import pytest
from support.layouts import compare_metrics, compare_runs, differing_weights
from support.programs import TINY_MODEL, Programs, read_metrics
from support.ranks import RankPools

ITERATIONS = 2
SETTINGS = (
    f"--num-layers 8 --train-iters {ITERATIONS} --global-batch-size 16 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 2 --eod-mask-loss --warmup 0 --batch-size 2"
).split()
ELEVEN = "--num-layers 11"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
TWO = {
    "documents-interleaved-uneven": f"--pipeline-schedule interleaved --pipeline-partition 0,2,1,2,2,1 {DOCUMENTS}",
    "zbh1-zero1-recompute-in-place": (
        "--pipeline-schedule zbh1 --zero-stage 1 --checkpoint-activations --gradient-accumulation-fusion"
    ),
    "documents-zbv-zero1": f"--pipeline-schedule zbv --zero-stage 1 {DOCUMENTS}",
    "zbh1-tp2-sequence-one-stage": (
        "--pipe-parallel-size 1 --model-parallel-size 2 --sequence-parallel --pipeline-schedule zbh1"
    ),
    "zbv-recompute-uneven": "--pipeline-schedule zbv --pipeline-partition 3,2,3,0 --checkpoint-activations",
}
FOUR = {
    "eleven-interleaved3-pp4-uneven": (
        f"{ELEVEN} --pipe-parallel-size 4 --pipeline-schedule interleaved --pipeline-partition 0,1,1,1,1,2,1,1,1,1,1,0"
    ),
    "interleaved-tp2-sequence-zero1": (
        "--pipe-parallel-size 2 --model-parallel-size 2 --sequence-parallel --zero-stage 1"
        " --num-virtual-stages-per-pipeline-rank 3"
    ),
    "zbh1-pp4-zero1": "--pipe-parallel-size 4 --pipeline-schedule zbh1 --zero-stage 1",
    "zbv-cp2": "--pipe-parallel-size 2 --context-parallel-size 2 --pipeline-schedule zbv",
    "documents-zbv-tp2-sequence-recompute": (
        "--pipe-parallel-size 2 --model-parallel-size 2 --sequence-parallel --pipeline-schedule zbv"
        f" --checkpoint-activations {DOCUMENTS}"
    ),
    "zbv-pp4": "--pipe-parallel-size 4 --pipeline-schedule zbv",
}
SIX = "--train-iters 6"
CHAIN = {
    "1f1b": "--pipeline-schedule 1f1b --zero-stage 1",
    "interleaved": (
        "--num-layers-per-virtual-pipeline-stage 2 --zero-stage 1 --checkpoint-activations --checkpoint-num-layers 2"
    ),
    "zbh1, uneven": "--pipeline-schedule zbh1 --pipeline-partition 5,3",
    "zbv": "--pipeline-schedule zbv --zero-stage 1",
    "dualpipev": "--pipeline-schedule dualpipev",
    "1f1b again": "--pipeline-partition 3,5",
}
"""Runs of one iteration, each of which resumes from the one before."""


@pytest.fixture(scope="module")
def runs(_rank_pools: RankPools, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the metrics and the checkpoint of each run; those of as many ranks follow in the same processes."""
    words = [*(word for word in TINY_MODEL), *programs.data_arguments]
    position = words.index("--num-layers")
    del words[position : position + 2]
    position = words.index("--warmup")
    del words[position : position + 2]
    folders: dict[str, Path] = {}

    def command(name: str, flags: str) -> list[str]:
        assert name not in folders, name
        folders[name] = folder = tmp_path_factory.mktemp("schedule")
        outputs = ["--metrics-file", str(folder / "metrics"), "--save", str(folder / "checkpoint")]
        return [*words, *SETTINGS, *flags.split(), *outputs]

    def train(ranks: int, flags_of: dict[str, str]) -> None:
        _rank_pools.run_once(ranks, pretrain_each, [command(name, flags) for name, flags in flags_of.items()])

    train(1, {"one": "", "documents": DOCUMENTS, "eleven": ELEVEN, "six": SIX})
    commands = [command(name, _with_stages(flags)) for name, flags in TWO.items()]
    saved = None
    for name, flags in CHAIN.items():
        commands.append(command(name, f"--pipe-parallel-size 2 {SIX} --exit-interval 1 {flags}"))
        commands[-1] += ["--load", str(saved)] if saved else []
        saved = folders[name] / "checkpoint"
    _rank_pools.run_once(2, pretrain_each, commands, time_limit=60 * len(commands))
    train(4, FOUR)
    return folders


def _with_stages(flags: str) -> str:
    """``flags`` with two stages, unless they say how many."""
    return flags if "--pipe-parallel-size" in flags else f"--pipe-parallel-size 2 {flags}"


def pretrain_each(commands: list[list[str]]) -> None:
    """Train once for each command line."""
    from support.training import pretrain

    for words in commands:
        code, output = pretrain(words)
        assert code == 0, output


def test_schedules_agree_with_one_process_and_resume_from_one_another(
    runs: dict[str, Path], subtests: pytest.Subtests
) -> None:
    """One test, so that one worker trains for all of it."""
    for name in (*TWO, *FOUR):
        with subtests.test(name):
            reference = runs[next((kind for kind in ("documents", "eleven") if name.startswith(kind)), "one")]
            assert len(compare_runs(reference, runs[name], ITERATIONS)) == ITERATIONS + 2  # a validation and the test
    expected = read_metrics(runs["six"] / "metrics")
    found = [line for name in CHAIN for line in read_metrics(runs[name] / "metrics")]
    assert {line["iteration"] for line in found} == {*range(1, len(CHAIN) + 1)}
    compare_metrics(expected, found)
    assert not differing_weights(runs["six"] / "checkpoint", runs["1f1b again"] / "checkpoint")
