"""The central test for T5: every layout gives the same losses, gradient norms and weights."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.audits import check_audit_of_sentences
from support.layouts import TOLERANCE, LayoutRuns, check_resumed, compare_runs, layout
from support.programs import read_metrics
from support.training import RankTraining

ITERATIONS = 2
SETTINGS = (
    f"--decoder-num-layers 4 --decoder-seq-length 12 --vocab-extra-ids 9 --train-iters {ITERATIONS} --batch-size 2"
    " --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.4 --eval-iters 1 --eval-interval 2"
).split()
LAYOUTS = [
    "pp2 zbv zero1 recompute --pipeline-partition 3,3,1,1",
    "pp2 --num-virtual-stages-per-pipeline-rank 2",
    "pp2 dualpipev --batch-size 1",
    "dp2 zero3 recompute --checkpoint-num-layers 3",
    "tp2 pp2 selective --pipeline-partition 5,3",  # a stage has layers of both stacks
    "pp2 zero1 recompute --pipeline-model-parallel-split-rank 1",
]


@pytest.fixture(scope="module")
def runs(train_t5_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_t5_in_ranks, SETTINGS, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def one_process(runs: LayoutRuns) -> Path:
    return runs.on_one_process()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(runs: LayoutRuns, one_process: Path, name: str) -> None:
    found = compare_runs(one_process, runs(*layout(name)), ITERATIONS)
    assert len(found) == ITERATIONS + 2  # a validation and the test


def test_the_audit_names_the_sentences_of_a_text(one_process):
    check_audit_of_sentences(one_process, ITERATIONS, 8)


def test_t5_resumes_from_a_checkpoint_of_another_layout(runs: LayoutRuns) -> None:
    """Tables of relative positions are divided by heads, and held by each stage of their stack."""
    check_resumed(runs, "tp2", "pp2", after=1)


def test_t5_begins_with_the_weights_of_a_hugging_face_folder(train_t5_in_ranks: RankTraining, run_ranks, tmp_path):
    """Each rank reads its shards: losses are those of one process, and not those of random weights."""
    run_ranks(1, write_folder, tmp_path / "hf")
    losses = []
    for ranks, words in ((1, ""), (2, "--model-parallel-size 2"), (2, "--pipe-parallel-size 2")):
        metrics = tmp_path / f"metrics{len(losses)}"
        of_run = ("--load-hf", tmp_path / "hf", "--eval-iters", "0", "--metrics-file", metrics, *words.split())
        train_t5_in_ranks(ranks, *SETTINGS, *of_run)
        losses.append(read_metrics(metrics)[0]["lm_loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=TOLERANCE)
    assert losses[0] > 4.5, "the weights are large: random ones would guess"


def write_folder(folder: Path) -> None:
    from support.command_lines import parse
    from support.whole_models import made_up_weights

    from megatron.tools.convert.full_model import FullModel
    from megatron.tools.convert.load_and_save import write_huggingface

    words = "t5 --hidden-size 32 --decoder-num-layers 4 --attention-dropout 0 --hidden-dropout 0"
    config = replace(parse(words).model, vocab_size=48, padded_vocab_size=48, decoder_start_token=0, eod_token=1)
    weights = {name: 5 * weight for name, weight in made_up_weights(config).items()}
    write_huggingface(folder, FullModel(config, weights), None, max_shard_size=20_000, carried={})
