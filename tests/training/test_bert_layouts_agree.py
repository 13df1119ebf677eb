"""The central test for BERT: every layout gives the same losses, gradient norms and weights."""

import json
from pathlib import Path

import pytest
from support.audits import check_audit_of_sentences
from support.layouts import COMPARED, LayoutRuns, check_resumed, compare_runs, layout
from support.programs import Programs
from support.training import RankTraining

ITERATIONS = 2
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 2"
).split()

LAYOUTS = [
    "pp2 zero1 recompute",
    "dp2 zero3",
    "tp2 pp2 sp sbh selective",
    "ulysses2",
    "pp1 cp2",
    "pp2 dualpipev",
]

PARTS = ("masked_lm_loss", "sop_loss")


@pytest.fixture(scope="module")
def runs(train_bert_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_bert_in_ranks, SETTINGS, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def one_process(runs: LayoutRuns) -> Path:
    return runs.on_one_process()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(runs: LayoutRuns, one_process: Path, name: str) -> None:
    found = compare_runs(one_process, runs(*layout(name)), ITERATIONS, COMPARED | set(PARTS))
    assert len(found) == ITERATIONS + 2  # a validation and the test
    assert not any(name.endswith("ppl") for line in found for name in line), "the loss is not of tokens alone"
    steps = [line for line in found if "lm_loss" in line]
    assert [sum(line[name] for name in PARTS) for line in steps] == pytest.approx([line["lm_loss"] for line in steps])


def test_bert_resumes_from_a_checkpoint_of_another_layout(runs: LayoutRuns) -> None:
    """The vocabulary is padded to another size, and so is the bias of its words."""
    check_resumed(runs, "tp2", "pp2", after=1)


def test_the_audit_names_the_sentences_of_both_spans(one_process):
    check_audit_of_sentences(one_process, ITERATIONS, 8)


def test_tools_recognize_a_checkpoint_of_bert(programs: Programs, one_process, tmp_path):
    folder = one_process / "checkpoint"
    refused = programs.pretrain(1, "--train-iters", "9", "--batch-size", "2", "--load", folder)
    assert refused.returncode == 4
    assert (
        f"error: the model is GPT-2, but BERT in {folder}/global_step{ITERATIONS}: load a model of the same shape"
        in (refused.output)
    )
    refused = programs.warm(1, "tools/generate.py", "--load", folder, "--prompt", "Baka")
    assert refused.returncode == 2 and len(refused.output.splitlines()) == 1
    assert f"{folder} is a BERT model, which cannot generate text: name one of pretrain_gpt2.py" in refused.output
    convert, file = "tools/convert_checkpoint.py", tmp_path / "one.safetensors"
    programs.warm(1, convert, "merge", folder, "--output", file).ok()
    report = programs.warm(1, "tools/inspect_checkpoint.py", file).ok().output
    assert "word_bias" in report
    assert "loaded by   safetensors.torch.load_file; tools/convert_checkpoint.py to-hf\n" in report
    programs.warm(1, convert, "to-hf", file, "--output", tmp_path / "hf").ok()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "megatron-bert"
