"""BERT on the corpus of the quickstart, with a vocabulary of its own: the way of the README, and a loss that falls."""

import math
from pathlib import Path

from support.programs import Programs, read_metrics


def test_the_loss_falls_on_the_quickstart_corpus(programs: Programs, tmp_path: Path):
    corpus, vocabulary = tmp_path / "corpus.jsonl", tmp_path / "vocab.txt"
    kind = ("--tokenizer-type", "BertWordPieceLowerCase")
    programs.warm(1, "tools/make_python_corpus.py", "--output", corpus, "--max-megabytes", "0.3").ok()
    size = ("--vocab-size", "512", "--output-dir", tmp_path)
    programs.warm(1, "tools/train_tokenizer.py", "--input", corpus, *kind, *size).ok()
    programs.warm(1, 
        "tools/preprocess_data.py", "--input", corpus, *kind, "--vocab-file", vocabulary, "--split-sentences",
        "--output-prefix", tmp_path / "corpus",
    ).ok()  # fmt: skip
    settings = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --batch-size 16 --train-iters 80"
        " --lr 2e-3 --warmup 0.1 --split 9,1,0 --eval-iters 4 --log-interval 1 --num-workers 0"
    ).split()
    programs.warm(
        1, "pretrain_bert.py", *settings, *kind, "--vocab-file", vocabulary, "--data-path",
        tmp_path / "corpus_text_sentence", "--metrics-file", tmp_path / "metrics",
    ).ok()  # fmt: skip
    lines = read_metrics(tmp_path / "metrics")
    losses = [line["lm_loss"] for line in lines if "lm_loss" in line]
    (validation,) = (line["validation_loss"] for line in lines if "validation_loss" in line)
    assert abs(losses[0] - math.log(512) - math.log(2)) < 0.2, "a guess of the word and of the order"
    assert sum(losses[-10:]) / 10 < losses[0] - 0.5 and validation < losses[0] - 0.5
