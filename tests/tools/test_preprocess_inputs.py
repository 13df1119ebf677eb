"""Inputs of other kinds than plain files of lines, interruptions, and memory."""

import bz2
import errno
import gzip
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from megatron.common.errors import DataError, ResourceError, limit_advice
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer.base import check_texts
from megatron.tools.preprocess.inputs import expand_inputs
from megatron.tools.preprocess.job import Job, Summary
from megatron.tools.preprocess.preprocess import preprocess

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["a b c", "d\nd", "b " * 5000, "ä", "c"] * 40


@pytest.fixture
def convert(tmp_path: Path, vocabulary: Path) -> Callable[..., Summary]:
    """``convert(path, output, **settings)``: preprocess a file in small chunks; skipped lines in ``messages``."""

    def run(path: Path, output: str = "out", resume: bool = False, **settings) -> Summary:
        settings = {"chunk_bytes": 1000, **settings}
        tokenizer = {"tokenizer_type": "WhitespaceTokenizer", "vocab_file": str(vocabulary)}
        job = Job(inputs=(path,), output_prefix=str(tmp_path / output), **tokenizer, **settings)
        return preprocess(job, lambda summary: None, run.messages.append, resume=resume)

    run.messages = []
    return run


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "id": 1}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts: list, kind: pyarrow.DataType | None = None) -> Path:
    table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=50)
    return path


def content(tmp_path: Path, output: str) -> list[bytes]:
    return [(tmp_path / f"{output}_text_document.{end}").read_bytes() for end in ("bin", "idx")]


def test_every_input_format_gives_the_same_data(tmp_path: Path, convert: Callable[..., Summary]) -> None:
    plain = jsonl(TEXTS)
    (tmp_path / "plain.jsonl").write_bytes(plain)
    # Compressed in two pieces, as parallel compressors do, and recognized by content if the name has no ending.
    halves = plain[:5000], plain[5000:]
    (tmp_path / "zipped.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    (tmp_path / "packed").write_bytes(b"".join(map(bz2.compress, halves)))
    (tmp_path / "squeezed").write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
    write_parquet(tmp_path / "rows.parquet", TEXTS)
    write_parquet(tmp_path / "words.parquet", TEXTS, pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))
    write_parquet(tmp_path / "large.parquet", TEXTS, pyarrow.large_string())
    table = pyarrow.table({"id": range(len(TEXTS)), "text": pyarrow.array(TEXTS, pyarrow.string_view())})  # as Polars
    for name, writer in {"stream.arrow": pyarrow.ipc.new_stream, "file.arrow": pyarrow.ipc.new_file}.items():
        with writer(str(tmp_path / name), table.schema) as file:
            file.write_table(table, max_chunksize=70)
    convert(tmp_path / "plain.jsonl", "plain")
    expected = content(tmp_path, "plain")
    assert len(IndexedDataset(tmp_path / "plain_text_document")) == len(TEXTS)
    others = "zipped.jsonl.gz packed squeezed rows.parquet words.parquet large.parquet stream.arrow file.arrow"
    for name in others.split():
        summary = convert(tmp_path / name, "other")
        assert content(tmp_path, "other") == expected, name
        assert summary.documents == len(TEXTS)


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0x55 for byte in content[middle : middle + 40]) + content[middle + 40 :]


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def test_a_table_is_no_text_unless_it_is_said_to_be(tmp_path: Path, convert: Callable[..., Summary]) -> None:
    (path := tmp_path / "a.csv").write_text("id,text\n1,a b\n")
    with pytest.raises(
        DataError, match=f"{path} is a table: write its text as JSONL or Parquet, or add --input-format"
    ):
        convert(path)
    assert convert(path, input_format="text").documents == 2


def test_a_compressed_archive_is_no_text(tmp_path: Path, convert: Callable[..., Summary]) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["a b"] * 20))
    with tarfile.open(path := tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.jsonl", "a.jsonl")
    with pytest.raises(DataError, match=rf"cannot read {path}.*: a tar archive: unpack it"):
        convert(path)


@pytest.mark.parametrize(("kind", "damage"), [("gz", cut), ("bz2", damaged), ("zst", damaged), ("parquet", damaged)])
def test_a_broken_file_is_refused(tmp_path: Path, convert: Callable[..., Summary], kind: str, damage: Callable) -> None:
    path = tmp_path / f"corpus.{kind}"
    texts = [f"a {n * 7919 % 100003} b" for n in range(3000)]
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    whole = write_parquet(path, texts).read_bytes() if kind == "parquet" else compress[kind](jsonl(texts))
    path.write_bytes(damage(whole))
    with pytest.raises(DataError, match=rf"cannot read {path}") as caught:
        convert(path, skip_errors=True)
    assert len(caught.value.messages) == 1 and "\n" not in str(caught.value)
    assert not any((tmp_path / f"out_text_document.{end}").exists() for end in ("bin", "idx"))


def test_rows_of_parquet_are_checked_like_lines(tmp_path: Path, convert: Callable[..., Summary]) -> None:
    cells = pyarrow.array([b"a", None, b"", b"\xff", b"b"], pyarrow.binary()).view(pyarrow.string())
    path = write_parquet(tmp_path / "rows.parquet", cells)
    with pytest.raises(DataError, match=rf'{path}:2: "text" is a null, where a string is needed'):
        convert(path)
    summary = convert(path, skip_errors=True)
    assert (summary.documents, summary.bad_lines, summary.empty) == (2, 2, 1)
    assert [message.split(": ")[0] for message in convert.messages] == [f"{path}:{number}" for number in (2, 3, 4)]
    with pytest.raises(DataError, match=r'no column "body" \(choose columns with --json-keys; there are id, text\)'):
        convert(path, json_keys=("body",), skip_errors=True)
    with pytest.raises(DataError, match='column "id" holds int64, where strings are needed'):
        convert(path, json_keys=("id",), skip_errors=True)
    pyarrow.parquet.write_table(pyarrow.table([cells, cells], names=["text", "text"]), path)
    with pytest.raises(DataError, match='2 columns are named "text": rename all but one'):
        convert(path)


def command(tmp_path: Path, vocabulary: Path, path: Path, *flags: str) -> list[str]:
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(path)]
    tool += ["--tokenizer-type", "WhitespaceTokenizer", "--vocab-file", str(vocabulary)]
    return [*tool, "--output-prefix", str(tmp_path / "out"), *flags]


def test_killed_conversion_resumes_to_the_same_bytes(
    tmp_path: Path, vocabulary: Path, convert: Callable[..., Summary]
) -> None:
    texts = ["a b c d " * (n % 100 + 1) for n in range(30_000)]
    texts[::977] = [""] * len(texts[::977])
    path = tmp_path / "corpus.jsonl.zst"
    lines = jsonl(texts).replace(b'{"text": ""', b'{"text": 7')
    path.write_bytes(zstandard.ZstdCompressor().compress(lines))
    whole = convert(path, "whole", skip_errors=True, chunk_bytes=1 << 18)
    words = command(tmp_path, vocabulary, path, "--on-error", "skip", "--workers", "2")
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (tmp_path / "out.progress").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out_text_document.idx").exists()
    with pytest.raises(DataError, match="out.progress is of a job with another --append-eod"):
        convert(path, resume=True, skip_errors=True, append_eod=True, chunk_bytes=1 << 18)
    deadline = time.monotonic() + 120
    while True:  # the killed one's workers hold the lock on the output for as long as the kernel takes to end them
        finished = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=240)
        if finished.returncode != 3 or time.monotonic() > deadline:
            break
    assert finished.returncode == 0, finished.stderr
    assert "documents written before" in finished.stdout
    assert f"{whole.documents:,} documents, {whole.tokens:,} tokens" in finished.stdout
    assert content(tmp_path, "out") == content(tmp_path, "whole")
    assert {file.name for file in tmp_path.glob("out*")} == {
        f"out_text_document.{ending}" for ending in ("bin", "idx", "tokenizer.json")
    }


PEAK = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(status, usage.ru_maxrss * 1024)
"""
"""A process between the tests and the tool: the peak of a child begins with what its parent has."""


def peak_memory(words: list[str]) -> int:
    """Bytes that a program had at most."""
    printed = subprocess.run(
        [sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True, timeout=240
    )
    status, peak = map(int, printed.stdout.split())
    assert status == 0
    return peak


def test_memory_does_not_grow_with_the_input(tmp_path: Path, vocabulary: Path) -> None:
    """Not even by the index: the documents are as many as can be."""
    peaks = []
    for size in (1 << 20, 4 << 20):
        path = tmp_path / f"{size}.jsonl"
        line = b'{"text": "a"}\n'
        path.write_bytes(line * (size // len(line)))
        peaks.append(peak_memory(command(tmp_path, vocabulary, path)))
    assert peaks[1] - peaks[0] < 3 << 20 < peaks[0] < 100 << 20, peaks


def test_a_word_of_megabytes_is_an_error_of_its_line(tmp_path: Path, convert: Callable[..., Summary]) -> None:
    """Tokenizers would need gigabytes for it. A long text of ordinary words is none."""
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a " * 600_000, "x" * 10_000_000, "b"]))
    message = "in.jsonl:2: a word of 10,000,000 characters begins at character 0, more than the 1,048,576 that can be"
    with pytest.raises(DataError, match=message) as caught:
        convert(tmp_path / "in.jsonl")
    assert caught.value.exit_code == 3 and len(caught.value.messages[0]) < 300
    summary = convert(tmp_path / "in.jsonl", skip_errors=True)
    assert (summary.documents, summary.bad_lines) == (2, 1) and len(convert.messages) == 1
    assert "space of 2,000,000 characters" in str(pytest.raises(DataError, check_texts, ["a" + " " * 2_000_000]).value)


@pytest.mark.parametrize(
    ("owner", "name", "error", "allowed"),
    [
        (os, "fork", OSError(errno.EMFILE, "Too many open files"), 0),
        (os, "fork", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 0),
        (os, "fork", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 3),
        (threading.Thread, "start", RuntimeError("can't start new thread"), 9),
        (threading.Thread, "start", RuntimeError("can't start new thread"), 10),
    ],
)
def test_workers_that_cannot_start_are_an_error_and_none_is_left(
    tmp_path: Path, convert, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception, allowed: int
) -> None:
    start, calls = getattr(owner, name), iter(range(allowed))

    def limited(*arguments: object) -> object:
        if next(calls, None) is None:
            raise error
        return start(*arguments)

    others = {*multiprocessing.active_children()}  # of other tests
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a"]))
    monkeypatch.setattr(owner, name, limited)
    with pytest.raises(ResourceError, match=f"--workers 8: .*{limit_advice(error)}"):
        convert(tmp_path / "in.jsonl", workers=8)
    assert not {*multiprocessing.active_children()} - others and not [*tmp_path.glob("out*")]


@pytest.mark.parametrize("kind, limit", [("f", 1000), ("n", 1)])
def test_a_limit_of_the_size_or_the_number_of_files_is_named(
    tmp_path: Path, convert: Callable[..., Summary], kind: str, limit: int
) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(TEXTS))
    number = {"f": resource.RLIMIT_FSIZE, "n": resource.RLIMIT_NOFILE}[kind]
    limits = resource.getrlimit(number)
    resource.setrlimit(number, (limit + (kind == "n") * len(os.listdir("/proc/self/fd")), limits[1]))
    try:
        with pytest.raises(ResourceError, match=f"ulimit -{kind}"):
            convert(tmp_path / "in.jsonl")
    finally:
        resource.setrlimit(number, limits)
    assert not [*tmp_path.glob("out*")]


def test_a_file_may_be_one_document(tmp_path: Path, convert) -> None:
    (path := tmp_path / "page").write_text("a b\nc\n")
    assert convert(path, input_format="document").documents == 1


@pytest.mark.parametrize("content", ["a b\nc\n".encode("utf-16-le"), b"a b\n\0\0\0\0"])
@pytest.mark.parametrize("kind", ["text", "document"])
def test_text_in_utf_16_is_an_error(tmp_path: Path, convert, content: bytes, kind: str) -> None:
    """It decodes as UTF-8, and so do the zeros that a full disk leaves at the end of a file."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"a.txt:[12]: [346] of its [0-9]+ bytes are 0: is the file in UTF-16"):
        convert(tmp_path / "a.txt", input_format=kind)


def test_inputs_may_be_folders_patterns_and_saved_data_sets(tmp_path: Path) -> None:
    saved = tmp_path / "folder" / "saved"
    saved.mkdir(parents=True)
    for name in ("folder/b.jsonl", "folder/a.txt.gz", "folder/notes.md", "folder/.c.txt", "folder/saved/1.arrow"):
        (tmp_path / name).touch()
    (saved / "0.arrow").touch()
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "1.arrow"}, {"filename": "0.arrow"}]}))

    def names(path: str, kind: str | None = None) -> list[str]:
        return [file.name for file in expand_inputs([tmp_path / path], kind)]

    assert names("folder/*.jsonl") == ["b.jsonl"]
    assert names("folder/saved") == ["1.arrow", "0.arrow"]
    assert names("folder") == ["a.txt.gz", "b.jsonl", "0.arrow", "1.arrow"]
    assert "notes.md" in names("folder", "document")
    with pytest.raises(DataError, match="no such file"):
        names("*.parquet")
    for make in (os.mkfifo, lambda path: path.symlink_to("nowhere")):
        make(other := tmp_path / "folder" / "c.jsonl")
        for place in ("folder", "folder/*.jsonl"):
            with pytest.raises(DataError, match=str(other)):
                names(place)
        other.unlink()
    (tmp_path / "folder" / "dataset_dict.json").touch()
    with pytest.raises(DataError, match="holds the data sets saved: name one of them, such as .*folder/saved"):
        names("folder")
    (saved / "state.json").rename(spare := tmp_path / "state.json")
    os.mkfifo(saved / "state.json")
    with pytest.raises(DataError, match="state.json: a FIFO"):
        names("folder/saved")
    spare.rename(saved / "state.json")
    for wrong in ("1", '{"filename": "../2.arrow"}'):
        (saved / "state.json").write_text(f'{{"_data_files": [{wrong}]}}')
        with pytest.raises(DataError, match="state.json"):
            names("folder/saved")


@pytest.mark.parametrize(("texts", "message"), [([], "no document in"), (["", " "], "no document has a token")])
def test_an_input_without_tokens_is_refused(tmp_path: Path, convert: Callable, texts: list[str], message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "in.jsonl")
