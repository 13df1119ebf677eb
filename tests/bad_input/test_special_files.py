"""What is no ordinary file is refused by name and never waited for; hostile JSON and numbers are one line each."""

import io
import os
import signal
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.command_lines import complaints, parse
from torch.distributed import checkpoint

from megatron.checkpoint.files import copy_file
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.safetensors_files import read_entries
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.tracker import holds_checkpoint, newest
from megatron.cli.deepspeed_json.file import read_config_file
from megatron.cli.settings_file import read_settings_file
from megatron.common.environment import world_size
from megatron.common.errors import CheckpointError, ConfigError, DataError, UserError
from megatron.common.files import replace_file
from megatron.common.reading import unreadable_arguments
from megatron.data.fingerprint import common_chat_template, other_tokenizers
from megatron.data.image_dataset import common_image_fit
from megatron.data.map_cache import Form, Recipe, _load
from megatron.launch.progress import ProgressState, write_recorded
from megatron.launch.watchdog import _Watchdog
from megatron.model.huggingface import read_json
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import Tokenizer, read_text, read_vocab_json
from megatron.tools.chat.files import chat_template, find_chat_template
from megatron.tools.cluster.elastic_run import ElasticRun
from megatron.tools.cluster.hostfile import read_hostfile
from megatron.tools.convert.huggingface_files import carried_files
from megatron.tools.convert.megatron_files import read_shards
from megatron.tools.convert.vocabulary import count_tokens
from megatron.tools.evaluation.tasks import Request, make_task
from megatron.tools.finetuning.tables import content_hash
from megatron.tools.inference import prompts
from megatron.tools.inference.prompts import read_prompts, read_standard_input
from megatron.tools.preprocess import file_lines
from megatron.tools.preprocess.corpus import read_chunks
from megatron.tools.preprocess.job import Journal
from megatron.tools.reporting.files import read_metrics, read_timeline
from megatron.tools.reporting.tracing import Profiler
from megatron.tools.serving.access import read_key
from megatron.training.memory import _write_report
from megatron.training.metrics import MetricsLogger

_NULL = build_tokenizer("NullTokenizer", None, None, vocab_size=9)
READERS: dict[str, Callable[[Path], object]] = {
    "config": lambda path: read_config_file(str(path)),
    "settings": lambda path: read_settings_file(str(path)),
    "vocabulary": lambda path: read_text(str(path)),
    "hostfile": read_hostfile,
    "weights": read_json,
    "prompts": read_prompts,
    "metrics": lambda path: list(read_metrics(path)),
    "trace": read_timeline,
    "key": lambda path: read_key(path, {}),
    "template": lambda path: chat_template(find_chat_template(str(path), path.parent, "a test"), _NULL),
    "manifest.json": lambda path: read_manifest(path.parent),
    "model.pt": read_file,
    "model.safetensors": read_entries,
    ".metadata": lambda path: read_shards(path.parent),
    "text.txt": lambda path: make_task("PPL", Request(path, 8, 8), _NULL),
    "text.parquet": lambda path: make_task("PPL", Request(path, 8, 8), _NULL),
    "corpus.jsonl": lambda path: list(read_chunks(path, "jsonl", ["text"], size=1000)),
    "corpus.parquet": lambda path: list(read_chunks(path, "parquet", ["text"], size=1000)),
}


_ZEROS = "/dev/zero"


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_a_socket_or_a_device_is_refused_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(file_lines, "PATIENCE_FOR_WRITER", 0.01)
    for make in (os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), lambda path: path.symlink_to(_ZEROS)):
        make(path := tmp_path / name)
        signal.alarm(60)  # a process that opens a FIFO would wait for ever
        try:
            with pytest.raises(UserError) as caught:
                READERS[name](path)
        finally:
            signal.alarm(0)
        (line,) = caught.value.messages
        assert str(tmp_path) in line
        assert "no such" not in line.lower() and line.count(str(tmp_path)) == 1 and "Errno" not in line
        path.unlink()


def _read_common(path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # about the missing process group
        checkpoint.save({"word_embeddings.weight": torch.ones(2, 2)}, checkpoint_id=path.parent, no_dist=True)
    read_shards(path.parent)


def _words(folder: Path) -> Tokenizer:
    (folder / "words.json").write_text('{"<|endoftext|>": 0, "<unk>": 1}')
    return build_tokenizer("WhitespaceTokenizer", str(folder / "words.json"), None)


OPTIONAL: dict[str, Callable[[Path], object]] = {
    "common.pt": _read_common,
    "preprocessor_config.json": lambda path: carried_files(path.parent),
    "vocab.json": lambda path: count_tokens(path.parent),
    "data_chat_template.json": lambda path: common_chat_template([str(path.parent / "data")]),
    "data.tokenizer.json": lambda path: other_tokenizers([str(path.parent / "data")], _words(path.parent)),
    "data_image_fit.txt": lambda path: common_image_fit([str(path.parent / "data")]),
    "latest": lambda path: newest(path.parent) if holds_checkpoint(path.parent) else None,
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_no_file_is_not_taken_for_absent(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")):
        (folder := tmp_path / make.__name__).mkdir()
        make(path := folder / name)
        with pytest.raises(UserError, match=name):
            OPTIONAL[name](path)


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (path := tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="git lfs pull") as caught:
        READERS[name](path)
    assert "copy it again" not in str(caught.value), "which would not help"


def test_what_is_no_file_is_not_replaced_copied_or_mapped(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "map_rows.npy")
    (link := tmp_path / "link").symlink_to("/dev/null")
    for path in (fifo, link):
        with pytest.raises(OSError, match="not a file"), replace_file(path):
            pass
        with pytest.raises(OSError):
            copy_file(path, tmp_path / "copy")
    assert fifo.is_fifo() and link.is_symlink()
    with pytest.raises(OSError, match="a FIFO, not a file"):
        content_hash([fifo])
    with pytest.raises((UserError, OSError)):
        _load(tmp_path, "map", Recipe({"rows": Form(np.int64, (-1,), 1)}, 8, dict))


def _profile(path: Path) -> None:
    callback = Profiler(parse(f"--train-iters 4 --profile-dir {path.parent} --profile-steps 1:1"), 0)
    with callback.around_iteration(1):
        pass


def _hang(path: Path) -> None:
    watchdog: Any = SimpleNamespace(_rank=0, _file=path, _progress=ProgressState(), _groups={})
    _Watchdog._write_position(watchdog)


def _start(path: Path) -> None:
    start, ended = SimpleNamespace(hosts=[], layout=""), SimpleNamespace(code=0, failed_first=set())
    run = SimpleNamespace(save=path.parent, progress=lambda: None)
    ElasticRun._record(cast(Any, run), cast(Any, start), cast(Any, ended), 0.0)


def _metrics(path: Path) -> None:
    log = MetricsLogger(parse(f"--metrics-file {path}"), is_main_rank=True)
    log.record(1, {"lm_loss": 1.0})
    log.close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "profile-rank0.txt": _profile,
    "profile-rank0.json": _profile,
    "profile-rank0.json.tmp": _profile,
    "memory-rank0.txt": lambda path: _write_report(parse(f"--save {path.parent}"), 0, "", None),
    "hang-rank0.txt": _hang,
    "flight-recorder-rank0": lambda path: write_recorded({"TORCH_FR_DUMP_TEMP_FILE": str(path)[:-1]}, 0),
    "elastic.jsonl": _start,
    "metrics.jsonl": _metrics,
}
APPENDED = {"elastic.jsonl": ["hardlink_to"], "metrics.jsonl": ["hardlink_to", "symlink_to"]}
"""Files that get longer, with the kinds of links that may lead to them: the metrics are where the user says."""


@pytest.mark.parametrize("name", WRITERS)
def test_a_report_does_not_wait_for_a_fifo_nor_overwrite_the_target_of_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    (other := tmp_path / "other").write_text("of another program\n")
    path = tmp_path / name
    for make in ("mkfifo", "symlink_to", "hardlink_to"):
        os.mkfifo(path) if make == "mkfifo" else getattr(path, make)(other)
        signal.alarm(60)
        try:
            WRITERS[name](path)
        except OSError as error:
            assert error.filename == str(path)
        finally:
            signal.alarm(0)
        if make not in APPENDED.get(name, ()):
            assert other.read_text() == "of another program\n"
        path.unlink(missing_ok=True)


def test_thousands_of_messages_are_a_hundred() -> None:
    assert ConfigError(map(str, range(1234))).messages[99:] == ["99", "and 1,134 more"]


CONFIGS = {
    '{"zero_optimization": {"stage": 1, "stage": 0}}': ", line 1: zero_optimization.stage was already given in line 1: "
    "remove one",
    '{"train_batch_size": ' + "9" * 5000 + "}": ": a number of 5,000 digits: write at most 18",
    '{"zero_optimization": {"reduce_bucket_size": 1e30}}': ", line 1: zero_optimization.reduce_bucket_size: "
    "1e+30 must be less than 2^63",
}


@pytest.mark.parametrize("text", CONFIGS, ids=range(len(CONFIGS)))
def test_a_hostile_config_is_one_line(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "ds.json").write_text(text)
    try:
        _, problems = read_config_file(str(path))
    except ConfigError as error:
        problems = error.messages
    assert problems == [f"{path}{CONFIGS[text]}"]


NESTED, DIGITS = "[" * 100_000, '{"a": ' + "9" * 5000 + "}"


@pytest.mark.parametrize("text", [NESTED, DIGITS], ids=["nested", "digits"])
def test_hostile_json_is_no_traceback(tmp_path: Path, text: str) -> None:
    (path := tmp_path / ".progress").write_text(text)
    for reader, error in (
        (Journal(path, {}).read, DataError),
        (lambda: read_vocab_json(str(path)), DataError),
        (lambda: list(read_metrics(path)), DataError),
        (lambda: read_timeline(path), DataError),
        (lambda: read_json(path), CheckpointError),
    ):
        with pytest.raises(error):
            reader()


def test_thousands_of_digits_are_one_line() -> None:
    digits = "9" * 5000
    places = ["--pipe-parallel-size 1 --pipeline-partition", "--trace out --trace-steps 1:", "--train-iters", "--save-"]
    for flags in places:
        (line,) = complaints(f"{flags} {digits}" if flags[-1].isalpha() else f"{flags}{digits}")
        assert len(line) < 200
    assert len(str(ConfigError(f"--num_gpus: invalid value: '{'9' * 600}' (see --help)"))) < 100
    assert str(ConfigError(f"{'x' * 255} is no folder")) == f"{'x' * 255} is no folder", "may be a file"
    with pytest.raises(ConfigError, match="set a whole number"):
        world_size({"WORLD_SIZE": digits})


def test_an_argument_that_is_not_utf8_is_named() -> None:
    words = ["--load", os.fsdecode(b"caf\xe9"), "caf\u00e9"]
    assert unreadable_arguments(words) == [r"the argument b'caf\xe9' is not UTF-8: rename the file that it names"]
    (line,) = unreadable_arguments([os.fsdecode(b"caf\xc3") + os.fsdecode(b"\xa9")])  # as it comes in with LC_ALL=C
    assert line == r"the argument 'caf\xe9' cannot be read in this locale: set LC_ALL=C.UTF-8 or PYTHONUTF8=1"


@pytest.mark.parametrize(
    ("content", "problem"), [(b"w1 \xff", "is not UTF-8"), (b"", "is empty"), (b"w" * 11, "has more than 10 bytes")]
)
def test_standard_input_without_text_or_without_end_is_refused(
    content: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "LARGEST", 10)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))
    with pytest.raises(ConfigError, match=f"standard input {problem}"):
        read_standard_input()
