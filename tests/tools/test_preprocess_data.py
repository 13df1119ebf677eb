"""tools/preprocess_data.py as a user runs it: its files, and errors for bad input."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import latest

from megatron.data.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]
EOD = 5


@pytest.fixture
def command(tmp_path: Path, vocabulary: Path) -> Callable[..., list[str]]:
    """``command(inputs, *flags)``: the words after the tool, writing to ``out``."""

    def build(inputs: Sequence[Path], *flags: str) -> list[str]:
        words = ["preprocess_data.py", "--input", *map(str, inputs), "--output-prefix", str(tmp_path / "out")]
        words += ["--tokenizer-type", "WhitespaceTokenizer", "--vocab-file", str(vocabulary)]
        return latest([*words, *flags])[1:]

    return build


@pytest.fixture
def run(tool: Callable) -> Callable:
    """``run(words)``: the tool with these words in this process."""
    return lambda words: tool("preprocess_data", *words)


WRITTEN = ("bin", "idx", "tokenizer.json")
"""Endings of a data set's files."""


def outputs(folder: Path) -> set[str]:
    """Names of what was written."""
    return {path.name for path in folder.glob("out*")}


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    assert dataset.doc_idx.tolist() == list(range(len(dataset) + 1))
    return [dataset.get(n).tolist() for n in range(len(dataset))]


def write_jsonl(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def one_error(finished: Any, code: int) -> str:
    """The single line of an error, with nothing else on the screen."""
    assert finished.returncode == code, finished.stderr
    assert finished.stdout == ""
    lines = finished.stderr.splitlines()
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("preprocess_data.py: error: ")
    return lines[0]


def test_jsonl(tmp_path: Path, command: Callable, run: Callable) -> None:
    first = write_jsonl(tmp_path / "first.jsonl", [{"text": "a b c"}, {"text": "d\nzzz"}])
    second = write_jsonl(tmp_path / "second", [{"text": "c"}])
    finished = run(command([first, second], "--append-eod"))
    assert finished.returncode == 0, finished.stderr
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[0, 1, 2, EOD], [3, 4, EOD], [2, EOD]]
    assert IndexedDataset(prefix).dtype.name == "uint16"
    size = first.stat().st_size + second.stat().st_size
    summary = f"{prefix}.bin and .idx: 3 documents, 9 tokens, 18 bytes from {size} bytes of text"
    assert finished.stdout == f"{summary}; 1 words not in the vocabulary\n"
    assert finished.stderr.count("\n") == 1 and finished.stderr.startswith(f"> {size}.0 of {size}.0B in ")
    assert "documents/s" in finished.stderr
    assert "B/s" in finished.stderr and "%" not in finished.stderr, "no bar in a pipe"


def test_plain_text(tmp_path: Path, command: Callable, run: Callable) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfa b\r\n\r\n  \nc \x00 d")
    finished = run(command([tmp_path / "corpus.txt"]))
    assert finished.returncode == 0 and finished.stdout.endswith("; 1 words not in the vocabulary; 2 blank lines\n")
    assert documents(tmp_path / "out_text_document") == [[0, 1], [2, 4, 3]]
    (tmp_path / "corpus").write_text("\n d d\n")
    finished = run(command([tmp_path / "corpus"], "--dataset-impl", "lazy"))
    assert finished.returncode == 0 and "--dataset-impl lazy has no effect" in finished.stderr
    assert documents(tmp_path / "out_text_document") == [[3, 3]]


def test_sentences_are_sequences_of_their_document(tmp_path: Path, command: Callable, run: Callable) -> None:
    lines = [{"text": "A b. C d d! A."}, {"text": "B\n\nC c c"}, {"text": "D d d d"}]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", lines)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", ".", "!"]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary))
    kind = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "vocab.txt")]
    finished = run(command([corpus], *kind, "--split-sentences"))
    assert finished.returncode == 0, finished.stderr
    assert outputs(tmp_path) == {f"out_text_sentence.{end}" for end in WRITTEN}
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert dataset.doc_idx.tolist() == [0, 3, 5, 6]
    spelt = ["".join(vocabulary[token] for token in dataset.get(n)) for n in range(len(dataset))]
    assert spelt == ["ab.", "cdd!", "a.", "b", "ccc", "dddd"]
    assert "3 documents, 17 tokens" in finished.stdout
    (tmp_path / "corpus.jsonl").write_text('{"text": "a."}\n{"text": " \\n\\n "}\n')
    blank = run(command([corpus], *kind, "--split-sentences"))
    assert blank.returncode == 0 and "1 document, " in blank.stdout
    assert blank.stdout.endswith("; 1 empty documents skipped\n")


def test_each_key_has_its_data_set(tmp_path: Path, command: Callable, run: Callable) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"title": "a", "body": "b c"}, {"title": "", "body": "d"}])
    finished = run(command([corpus], "--json-keys", "title", "body", "--on-error", "skip"))
    assert finished.returncode == 0, finished.stderr
    assert documents(tmp_path / "out_title_document") == [[0]]
    assert documents(tmp_path / "out_body_document") == [[1, 2], [3]]
    assert outputs(tmp_path) == {f"out_{key}_document.{end}" for key in ("title", "body") for end in WRITTEN}


BAD_LINES = [
    (b'{"text": "a"', "not JSON: Expecting ',' delimiter, at column 13"),
    (b"[" * 100000, "JSON that cannot be read"),
    (b'["a"]', "a JSON list, where an object is needed"),
    (b'{"txt": "a"}', 'no key "text" (choose keys with --json-keys)'),
    (b'{"text": "a", "text": "b"}', 'JSON that cannot be read: the key "text" occurs twice in an object'),
    (b'{"text": 3}', '"text" is a number, where a string is needed'),
    (b'{"text": null}', '"text" is a null, where a string is needed'),
    (b'{"text": "a\xff"}', "byte 12 of the line is not UTF-8"),
    (b'{"text": "\\ud800"}', "character 0 of the text is U+D800, half of a surrogate pair"),
    (b'{"text": ""}', 'no text under "text"'),
    (b"  ", 'no text under "text"'),
]


def test_bad_lines_can_be_skipped(tmp_path: Path, command: Callable, run: Callable) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "a"}\n' + b"\n".join(line for line, _ in BAD_LINES) + b'\n{"text": "b"}')
    finished = run(command([corpus], "--on-error", "skip", "--workers", "2"))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.endswith("; 9 bad lines skipped; 2 empty documents skipped\n")
    report = [line for line in finished.stderr.splitlines() if "skipped" in line]
    assert len(report) == len(BAD_LINES)
    for number, ((_, message), line) in enumerate(zip(BAD_LINES, report, strict=True), start=2):
        assert f"> skipped {corpus}:{number}: {message}" in line
    assert documents(tmp_path / "out_text_document") == [[0], [1]]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ["--split-sentences", "--append-eod", "--tokenizer-type", "BertWordPieceCase"],
            2,
            "--append-eod and --split-sentences exclude each other",
        ),
        (["--json-keys", "../a"], 2, "a key with / cannot be part"),
        (["--image-tokens", "4"], 2, "--image-tokens without --format images"),
        (["--format", "images", "--image-tokens", "4", "--image-token-id", "1", "--resume"], 2, "cannot be resumed"),
        (
            ["--format", "images", "--image-tokens", "4", "--image-token-id", "1"],
            2,
            "--format images needs a chat template",
        ),
        (
            ["--format=images", "--image-tokens=4", "--image-token-id=99", f"--chat-template={ROOT / 'README.md'}"],
            2,
            "--image-token-id 99 is beyond the vocabulary of",
        ),
        (["--tokenizer-type", "NullTokenizer"], 2, "NullTokenizer reads no text"),
        (["--vocab-file", "/nowhere.json"], 3, "/nowhere.json"),
        (["--output-prefix", "/proc/nowhere/out"], 2, "/proc is of the system"),
    ],
)
def test_bad_flags(tmp_path: Path, command: Callable, run: Callable, flags: list[str], code: int, message: str) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": "a"}])
    assert message in one_error(run(command([corpus], *flags)), code)
    assert outputs(tmp_path) == set()


def test_a_folder_in_place_of_an_output_leaves_no_files(tmp_path: Path, command: Callable, run: Callable) -> None:
    (tmp_path / "out_text_document.idx").mkdir()
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": "a"}])
    assert "out_text_document." in one_error(run(command([corpus])), 2)
    assert outputs(tmp_path) == {"out_text_document.idx"}


@pytest.mark.parametrize("name", ["out_text_document.bin", "out.progress"])
def test_an_output_that_is_read_is_refused(tmp_path: Path, command: Callable, run: Callable, name: str) -> None:
    corpus = write_jsonl(tmp_path / name, [{"text": "a"}])
    before = corpus.read_bytes()
    assert f"{name}, which is read" in one_error(run(command([corpus], "--input-format", "jsonl")), 2)
    assert corpus.read_bytes() == before


def test_full_disk_leaves_no_files(tmp_path: Path, command: Callable) -> None:
    """In a process of its own, which may write little; away from the project, where the tool finds its package."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": "a b c d " * 1000}] * 100)
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *command([corpus])]
    words = ["bash", "-c", f"ulimit -f 100; {shlex.join(tool)}"]
    finished = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=240)
    assert "cannot write" in one_error(finished, 7)
    assert outputs(tmp_path) == set()
