"""T5 learns from pairs of texts: to write words in reverse order, and then writes those it has not seen."""

import json
import random
from pathlib import Path

import pytest
from support.programs import Programs, read_metrics

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox"]
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --encoder-seq-length 6 --decoder-seq-length 5".split()


@pytest.fixture(scope="module")
def trained(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint, the metrics, and texts that training has not seen, with their targets."""
    folder, chance = tmp_path_factory.mktemp("pairs"), random.Random(3)
    every = [[a, b, c] for a in WORDS for b in WORDS for c in WORDS]
    chance.shuffle(every)
    lines = [json.dumps({"input": " ".join(words), "target": " ".join(words[::-1])}) + "\n" for words in every]
    (folder / "pairs.jsonl").write_text("".join(lines))
    (folder / "unseen.jsonl").write_text("".join(lines[-20:]).replace('"input"', '"prompt"'))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    kind = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", folder / "vocab.txt")
    programs.warm(
        1, "tools/preprocess_data.py", "--input", folder / "pairs.jsonl", *kind, "--json-keys", "input", "target",
        "--output-prefix", folder / "pairs",
    ).ok()  # fmt: skip
    settings = (
        "--sft --vocab-extra-ids 4 --batch-size 32 --train-iters 300 --lr 8e-3 --lr-decay-style cosine --warmup 0.1"
        " --hidden-dropout 0 --attention-dropout 0 --split 90,10,0 --weight-decay 0 --eval-iters 1"
        " --num-workers 0 --log-interval 50"
    ).split()
    programs.warm(
        1, "pretrain_t5.py", *MODEL, *settings, *kind, "--data-path", folder / "pairs_input_document",
        "--metrics-file", folder / "metrics", "--save", folder / "checkpoint",
    ).ok()  # fmt: skip
    return folder


def test_it_writes_unseen_words_in_reverse(programs: Programs, trained: Path):
    lines = read_metrics(trained / "metrics")
    (perplexity,) = (line["validation_ppl"] for line in lines if "validation_ppl" in line)
    assert perplexity < 1.2, "of targets that training has not seen"
    programs.warm(
        1, "tools/generate.py", "--load", trained / "checkpoint", "--sample-input-file", trained / "unseen.jsonl",
        "--sample-output-file", trained / "found.jsonl", "--greedy", "--new-tokens", "6", "--batch-size", "20",
    ).ok()  # fmt: skip
    found = [json.loads(line) for line in (trained / "found.jsonl").read_text().splitlines()]
    right = [line["completions"][0]["text"].split() == line["target"].split() for line in found]
    assert len(right) == 20 and sum(right) >= 18
    assert {line["completions"][0]["finish_reason"] for line in found} <= {"stop", "length"}


def test_evaluation_finds_the_targets(programs: Programs, trained: Path):
    (trained / "pairs_unseen.jsonl").write_text("".join((trained / "pairs.jsonl").read_text().splitlines(True)[-20:]))
    words = ("--task", "PAIRS", "--valid-data", trained / "pairs_unseen.jsonl", "--json", trained / "scores.json")
    programs.warm(1, "tools/evaluate.py", "--load", trained / "checkpoint", *words, "--batch-size", "8").ok()
    found = json.loads((trained / "scores.json").read_text())
    assert found["perplexity"] < 1.2 and found["accuracy"] >= 0.9
    assert (found["pairs"], found["pairs_cut"], found["tokens"]) == (20, 0, 80)
    refused = programs.warm(1, "tools/evaluate.py", "--load", trained / "checkpoint", "--task", "PPL", *words[2:])
    assert refused.returncode == 2 and "which has an encoder: name one of pretrain_gpt2.py" in refused.output


def test_pairs_that_do_not_match_are_refused(programs: Programs, trained: Path):
    kind = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {trained}/vocab.txt --vocab-extra-ids 4"
    words = (*MODEL, *f"{kind} --sft --train-iters 2 --batch-size 2 --lr 1e-3".split())
    for prefix, message in (
        ("pairs_target_document", "is not named as texts with targets are: make it with tools/preprocess_data.py"),
        ("other_input_document", "other_input_document"),
    ):
        refused = programs.warm(1, "pretrain_t5.py", *words, "--data-path", trained / prefix)
        assert refused.returncode == 3 and message in refused.output and "Traceback" not in refused.output
