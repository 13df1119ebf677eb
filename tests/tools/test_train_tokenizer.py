"""tools/train_tokenizer.py: whole, equal files from equal text; bad input is one line with exit code 2 or 3."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.refusals import ROOT

from megatron.tokenizer import build_tokenizer

LINES = ["the cat sat on the mat", "the hat of the cat naïve 日本", "dogs and cats and <|endoftext|> <unk>"]


@pytest.fixture
def train(tool: Callable) -> Callable:
    """``train(*words)``: the tool in this process."""
    return partial(tool, "train_tokenizer")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": line, "title": "zzz zzz"}) + "\n\n" for line in LINES))
    return path


def test_trained_bpe_is_read_by_the_tokenizer(train: Callable, corpus: Path, tmp_path: Path):
    flags = ("--vocab-size", 280, "--min-frequency", 1, "--output-dir", tmp_path / "made" / "here")
    result = train("--input", corpus, *flags)
    assert result.returncode == 0, result.stderr
    summary = f"{tmp_path / 'made' / 'here'}: 280 tokens, <|endoftext|> = 279, from 3 documents, 0.00 MB\n"
    assert result.stdout == summary
    assert result.stderr.startswith("> reading: ") and result.stderr.count("\n") == 1, "no bar in a pipe"
    folder = tmp_path / "made" / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "vocab.json"]
    tokenizer = build_tokenizer("GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "merges.txt"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (280, 279)
    assert len(tokenizer.tokenize(LINES[0])) < len(LINES[0]), "merges apply"
    assert tokenizer.detokenize(tokenizer.tokenize(LINES[1])) == LINES[1]


def test_equal_text_makes_equal_files_from_any_format(train: Callable, corpus: Path, tmp_path: Path):
    text = tmp_path / "corpus.txt"
    text.write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    assert train("--input", corpus, "--vocab-size", 280, "--output-dir", tmp_path / "a").returncode == 0
    assert train("--input", text, "--vocab-size", 280, "--output-dir", tmp_path / "b").returncode == 0
    (tmp_path / "zipped.jsonl").write_bytes(gzip.compress(corpus.read_bytes()))
    zipped = ("--input", tmp_path / "zipped.jsonl", "--vocab-size", 280)
    assert train(*zipped, "--output-dir", tmp_path / "c").returncode == 0
    for name in ("vocab.json", "merges.txt"):
        assert len({(tmp_path / folder / name).read_bytes() for folder in "abc"}) == 1


def test_two_trainings_make_the_same_wordpieces(train: Callable, corpus: Path, tmp_path: Path):
    """In the library's own trainer they would not."""
    made = []
    for name in ("one", "other"):
        flags = ("--tokenizer-type", "BertWordPieceLowerCase", "--min-frequency", 1, "--output-dir", tmp_path / name)
        result = train("--input", corpus, "--vocab-size", 80, *flags)
        assert result.returncode == 0, result.stderr
        made.append((tmp_path / name / "vocab.txt").read_text(encoding="utf-8"))
    assert made[0] == made[1] and [path.name for path in (tmp_path / "one").iterdir()] == ["vocab.txt"]
    assert ", [SEP] = 3, from 3 documents" in result.stdout
    tokenizer = build_tokenizer("BertWordPieceLowerCase", str(tmp_path / "one" / "vocab.txt"), None)
    assert tokenizer.detokenize(tokenizer.tokenize(LINES[0])) == LINES[0]


@pytest.mark.parametrize(
    ("line", "message"), [('{"text": ', "not JSON"), ('{"text": "\\ud800"}', "character 0 of the text is U+D800, half")]
)
def test_bad_text_is_one_line_and_leaves_no_files(train: Callable, tmp_path: Path, line: str, message: str):
    (corpus := tmp_path / "corpus.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    result = train("--input", corpus, "--vocab-size", 300, "--output-dir", tmp_path / "out")
    assert result.returncode == 3 and f"corpus.jsonl:2: {message}" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_the_input_leaves_all_files_as_they_are(train: Callable, corpus: Path, tmp_path: Path):
    (place := tmp_path / "place").mkdir()
    (text := place / "vocab.json").write_bytes(corpus.read_bytes())
    result = train("--input", text, "--vocab-size", 300, "--output-dir", place)
    assert result.returncode == 2 and "is an input of this command" in result.stderr
    assert [path.name for path in place.iterdir()] == ["vocab.json"] and text.read_bytes() == corpus.read_bytes()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--vocab-size 256", "--vocab-size 256 is too small: a byte-level BPE needs 257 or more"),
        ("--vocab-size 999999999999", "--vocab-size 1e+12 must be 10,000,000 at most"),
        ("--vocab-size 300 --min-frequency 99999999999999999999", "--min-frequency of 20 digits must be"),
        ("--vocab-size 3 --tokenizer-type BertWordPieceCase", "--vocab-size 3 is too small: the text's"),
    ],
)
def test_bad_flags_are_one_line(train: Callable, corpus: Path, tmp_path: Path, words: str, expected: str):
    result = train("--input", corpus, "--output-dir", tmp_path / "out", *words.split())
    assert result.returncode == 2 and expected in result.stderr.splitlines()[-1]


def test_files_of_a_tokenizer_are_replaced_together(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one two three\n" * 50)
    words = ["--input", str(tmp_path / "in.txt"), "--output-dir", str(tmp_path / "out"), "--vocab-size"]
    tool = [sys.executable, "-B", str(ROOT / "tools/train_tokenizer.py"), *words]
    subprocess.run([*tool, "270"], check=True, capture_output=True)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    limited = subprocess.run(["bash", "-c", 'ulimit -f 2; "$@"', "bash", *tool, "280"], capture_output=True, text=True)
    assert limited.returncode == 7 and "ulimit -f" in limited.stderr
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
