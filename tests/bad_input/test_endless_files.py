"""Files that are none, that expand without end, or that hold JSON of another shape: refused at once, in lines."""

import gzip
import json
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_lines import parse
from support.fuzzing import outcome

from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.run_file import SavedRun, checked_description, describe
from megatron.checkpoint.snapshot_files import read_start
from megatron.checkpoint.tensor_files import read_file
from megatron.cli.deepspeed_json.file import read_config_file
from megatron.common import reading
from megatron.common.errors import CheckpointError, UserError
from megatron.model.huggingface import config_of
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import read_text
from megatron.tools.preprocess import corpus, file_lines
from megatron.tools.preprocess.corpus import read_chunks


@pytest.fixture(autouse=True)
def _ends_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(file_lines, "PATIENCE_FOR_WRITER", 0.01)
    signal.alarm(60)  # a process that opens a FIFO would wait for ever
    yield
    signal.alarm(0)


def chunks(path: Path, kind: str = "jsonl") -> list[Any]:
    return list(read_chunks(path, kind, ["text"], size=1000))


def test_a_snapshot_of_a_fifo_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".snapshots")
    assert read_start(tmp_path) == ""


@pytest.mark.parametrize(("has_writer", "seconds"), [(False, "0.02"), (True, "0.1")])
def test_a_fifo_without_a_writer_is_not_waited_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_writer: bool, seconds: str
) -> None:
    monkeypatch.setattr(file_lines, "PATIENCE", 0.1)
    monkeypatch.setattr(file_lines, "PATIENCE_FOR_WRITER", 0.02)
    os.mkfifo(fifo := tmp_path / "corpus.jsonl")
    writer = os.open(fifo, os.O_RDWR) if has_writer else os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(UserError, match=f"nothing was written in {seconds} s"):
        chunks(fifo)
    os.close(writer)


def test_a_pipe_with_a_writer_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"text": "a"}\n')
    os.close(writer)
    (chunk,) = chunks(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert chunk.lines == [b'{"text": "a"}\n']


def zip_bomb(path: Path) -> None:
    torch.save({"weight": torch.zeros(1 << 20)}, path)
    with (
        zipfile.ZipFile(path) as stored,
        zipfile.ZipFile(path.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.namelist():
            packed.writestr(entry, stored.read(entry))
    os.replace(path.with_suffix(".zip"), path)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(4 << 30)


def gzip_bomb(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100_000))


def empty_lines(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\r\n" * 20 + b"a\n" + b"\n" * 200))


def parquet_bomb(path: Path, length: int = 50_000, rows: int = 1000) -> None:
    import pyarrow
    from pyarrow import parquet

    long = pyarrow.DictionaryArray.from_arrays([0] * rows, [os.urandom(length).hex()])
    parquet.write_table(pyarrow.table({"text": long}), path)


def endless_parquet(path: Path) -> None:
    sparse(path)
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write((4_200_000_000).to_bytes(4, "little") + b"PAR1")


def arrow_bomb(path: Path, texts: Any = None) -> None:
    import pyarrow.ipc

    texts = ["a" * 10_000] * 100 if texts is None else texts
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    batch = pyarrow.record_batch({"text": texts})
    new = pyarrow.ipc.new_stream if path.stem == "stream" else pyarrow.ipc.new_file
    with new(path, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def arrow_end(path: Path) -> None:
    """A mark of the end in place of the batch."""
    arrow_bomb(path, ["a"])
    begin, batch, rest = path.read_bytes().rpartition(b"\xff\xff\xff\xff\xb0\0\0\0")
    path.write_bytes(begin + batch[:4] + bytes(4) + rest)


def arrow_words(path: Path) -> None:
    import pyarrow

    arrow_bomb(path, pyarrow.DictionaryArray.from_arrays([0], ["a" * 1_000_000]))


BOMBS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object], str]] = {
    "weights.pt": (zip_bomb, read_file, "expand to 4,19"),
    "manifest.json": (sparse, lambda path: read_manifest(path.parent), "too large|cannot be read"),
    "vocab.json": (sparse, lambda path: read_text(str(path)), "more than the 134,217,728 bytes that such"),
    "ds.json": (sparse, lambda path: read_config_file(str(path)), "more than the 262,144 bytes that such"),
    "endless.json": (  # the system says that it has no bytes
        lambda path: path.symlink_to("/proc/self/smaps"),
        lambda path: read_config_file(str(path)),
        "more than the 262,144 bytes that such",
    ),
    "corpus.jsonl": (sparse, chunks, "a line of more than 65,536 bytes"),
    "corpus.jsonl.gz": (gzip_bomb, chunks, "expands to more than 100 times its size"),
    "empty.jsonl.gz": (empty_lines, chunks, "more than 100 empty lines in a row"),
    "corpus.parquet": (parquet_bomb, lambda path: chunks(path, "parquet"), "a row of more than 65,536 bytes"),
    "words.parquet": (
        lambda path: parquet_bomb(path, 500, 20_000),
        lambda path: chunks(path, "parquet"),
        "expands to more than 100 times its size",
    ),
    "end.arrow": (arrow_end, lambda path: chunks(path, "arrow"), "batches: it holds 0, and lists 1"),
    "end.parquet": (endless_parquet, lambda path: chunks(path, "parquet"), "description has 4,200,000,000 bytes"),
    **{
        name: (make, lambda path: chunks(path, "arrow"), "expands to more than 100 times its size")
        for name, make in {"stream.arrow": arrow_bomb, "file.arrow": arrow_bomb, "words.arrow": arrow_words}.items()
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_expands_without_end_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_LINE", 1 << 16)
    for module in (corpus,):
        monkeypatch.setattr(module, "LARGEST_LINE", 1 << 16)
    for module in (corpus, file_lines):
        monkeypatch.setattr(module, "LARGEST", 1 << 16)
        monkeypatch.setattr(module, "MOST_EXPANDED", 100)
    monkeypatch.setattr(file_lines, "MOST_EMPTY", 100)
    make, read, message = BOMBS[name]
    make(tmp_path / name)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


NESTED: Any = 0
for _ in range(90):
    NESTED = [NESTED]
WRONG: list[Any] = [None, True, -1, 0, 1.5, 1e300, 10**30, float("nan"), "x", "\x1b[2J", "a" * 10**6, [], {}, [["x"]]]
WRONG += [NESTED, {"a": {}}, 10**9]
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16, "vocab_size": 10, "rms_norm_eps": 1e-6,
    "eos_token_id": [1], "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "beta_fast": 32},
}  # fmt: skip


def changed(tree: Any) -> Iterator[tuple[str, Any]]:
    """``tree`` with each of its values replaced by each of ``WRONG``, or removed; and where."""
    for key, value in tree.items():
        yield key, {name: inner for name, inner in tree.items() if name != key}
        for wrong in WRONG:
            yield key, {**tree, key: wrong}
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", {**tree, key: other}) for inner, other in changed(value))


def test_a_model_of_another_shape_is_refused_in_lines() -> None:
    accepted = [outcome(lambda tree=tree: config_of(tree, Path("config.json")), 4) for _, tree in changed(LLAMA)]
    models = [model for model in accepted if model is not None]
    assert len(models) < len(accepted) // 4
    assert all(model.num_layers <= 20_000 and model.hidden_size <= 1 << 20 for model in models)


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope_parameters", []),
        ("quantization_config", {"bits": 4}),
        ("eos_token_id", [[[]]]),
        ("eos_token_id", 1.0),
        ("bos_token_id", "x"),
        ("pad_token_id", [True]),
        ("torch_dtype", 7),
        ("torch_dtype", "banana"),
        ("dtype", ["float32"]),
        ("dtype", "int8"),
    ],
)
def test_a_setting_that_is_not_taken_over_is_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        config_of({**LLAMA, key: value}, Path("config.json"))


@pytest.mark.parametrize(
    ("section", "name", "value", "problem"),
    [
        ("model", "encoder_num_layers", 2, "encoder_num_layers is 2, and GPT-2 has no encoder"),
        ("model", "vision_num_layers", 2, "vision_num_layers is 2, and GPT-2 has no encoder"),
        ("model", "num_attention_heads", 0, "num_attention_heads is 0, and GPT-2 has some"),
        ("data", "chat_template", "{{ messages }}", "chat_template is not as it was saved"),
        ("data", "chat_template", '{"chat_template": "x", "special_tokens": {"a": 5}}', "chat_template is not as"),
        ("data", "chat_template", '{"chat_template": ["x"], "special_tokens": {}}', "chat_template is not as"),
    ],
)
def test_a_run_that_contradicts_itself(section: str, name: str, value: Any, problem: str) -> None:
    tree = json.loads(json.dumps(describe(parse(""), 2)))
    assert checked_description(tree, "run.json")
    tree["config"][section][name] = value
    with pytest.raises(CheckpointError, match=problem):
        checked_description(tree, "run.json")


def test_a_vocabulary_whose_name_is_too_long() -> None:
    with pytest.raises(UserError, match="no such file"):
        build_tokenizer("WhitespaceTokenizer", "x" * 5000, None)


def test_a_run_of_another_shape_is_refused_in_lines() -> None:
    tree = json.loads(json.dumps(describe(parse(""), 2)))
    tree["config"] = {name: tree["config"][name] for name in ("model", "data")}

    def read(tree: Any) -> SavedRun:
        saved = SavedRun(Path("folder"), "global_step2", checked_description(tree, "run.json"))
        saved.full_model_config(), saved.layout.zero_ranks, saved.history, saved.skipped_samples
        return saved

    assert read(tree)
    for key in ("iteration", "layout", "config", "left_out_samples", "ledger"):
        for _, wrong in changed({key: tree[key]} if key != "config" else {}):
            outcome(lambda wrong=wrong: read({**tree, **wrong}), 4)
    for number, (key, wrong) in enumerate(product(tree["config"]["model"], WRONG)):
        if number % 7 == 0:  # of all pairs
            config = {**tree["config"], "model": {**tree["config"]["model"], key: wrong}}
            outcome(lambda config=config: read({**tree, "config": config}), 2, 4)
