"""Every pipeline schedule gives the losses, gradient norms and weights of one process, and resumes from another one."""

from pathlib import Path

import pytest
from support.layouts import compare_metrics, compare_runs, differing_weights, layout
from support.programs import TINY_MODEL, Programs, read_metrics
from support.ranks import RankPools

ITERATIONS = 2
SETTINGS = (
    f"--num-layers 8 --train-iters {ITERATIONS} --global-batch-size 16 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 2 --eod-mask-loss --warmup 0 --batch-size 2"
).split()
TWO = [
    "documents pp2 interleaved --batch-size 4 --pipeline-partition 0,2,1,2,2,1",
    "pp1 tp2 sp zero1 zbh1 overlap sbh --batch-size 4",
    "pp2 zbv recompute --batch-size 4 --pipeline-partition 3,2,3,0",
]
FOUR = [
    "pp4 interleaved --pipeline-partition 0,1,1,2,1,2,1,0",
    "pp2 tp2 sp zero1 --batch-size 4 --num-virtual-stages-per-pipeline-rank 3",
    "pp4 zbh1 zero1 recompute in-place",
    "pp2 cp2 zbv --batch-size 4",
    "documents pp2 tp2 sp zbv recompute --batch-size 4",
    "pp4 zbv --recompute-mlp-activation",
]
SIX = "--train-iters 6"
CHAIN = [
    "pp2 1f1b zero1",
    "pp2 zero1 recompute --num-layers-per-virtual-pipeline-stage 2 --checkpoint-num-layers 2",
    "pp2 zbh1 --pipeline-partition 5,3",
    "pp2 zbv zero1",
    "pp2 dualpipev",
    "pp2 --pipeline-partition 3,5",
]
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

    def command(name: str, more: str = "") -> list[str]:
        assert name not in folders, name
        folders[name] = folder = tmp_path_factory.mktemp("schedule")
        outputs = ["--metrics-file", str(folder / "metrics"), "--save", str(folder / "checkpoint")]
        return [*words, *SETTINGS, *layout(name)[1].split(), *more.split(), *outputs]

    ones = [command(name, "--batch-size 16") for name in ("dp1", "documents", SIX)]
    _rank_pools.run_once(1, pretrain_each, ones)
    commands, saved = [command(name) for name in TWO], ""
    for name in CHAIN:
        commands.append(command(name, f"{SIX} --batch-size 4 --exit-interval 1 {saved}"))
        saved = f"--load {folders[name] / 'checkpoint'}"
    _rank_pools.run_once(2, pretrain_each, commands, time_limit=60 * len(commands))
    _rank_pools.run_once(4, pretrain_each, [command(name) for name in FOUR])
    return folders


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
            reference = runs["documents" if name.startswith("documents") else "dp1"]
            assert len(compare_runs(reference, runs[name], ITERATIONS)) == ITERATIONS + 2  # a validation and the test
    expected = read_metrics(runs[SIX] / "metrics")
    found = [line for name in CHAIN for line in read_metrics(runs[name] / "metrics")]
    assert {line["iteration"] for line in found} == {*range(1, len(CHAIN) + 1)}
    compare_metrics(expected, found)
    assert not differing_weights(runs[SIX] / "checkpoint", runs[CHAIN[-1]] / "checkpoint")
