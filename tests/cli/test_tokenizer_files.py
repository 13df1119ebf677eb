"""Which files a tokenizer reads: two flags, one of them with the file beside it, or a folder."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.command_lines import CPU, SMALL, SMALL_BERT, complaints
from support.refusals import ROOT

from megatron.cli import parse_run
from megatron.common.errors import ConfigError, DataError
from megatron.common.tokenizer_files import (
    HUGGINGFACE,
    SENTENCEPIECE,
    check_tokenizer_folder,
    other_words,
    tokenizer_files,
    tokenizer_kind,
)
from megatron.model.architectures import BERT, GPT2
from megatron.tokenizer import build_tokenizer
from megatron.tools.inference.source import TokenizerFiles
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.request import make_request

sys.path.insert(0, str(ROOT / "tools"))
import preprocess_data  # noqa: E402

GPT2_WORDS = SMALL.replace("--vocab-file vocab.json --merge-file merges.txt", "")
BERT_WORDS = SMALL_BERT.replace("--vocab-file vocab.txt", "")


@pytest.mark.parametrize(
    "present, vocabulary, merges",
    [
        (["vocab.json", "merges.txt"], "vocab.json", "merges.txt"),
        (["gpt2-vocab.json", "gpt2-merges.txt", "merges.txt"], "gpt2-vocab.json", "gpt2-merges.txt"),
        (["gpt2-vocab.json", "merges.txt"], "gpt2-vocab.json", "merges.txt"),
        (["gpt2-vocab.json"], "gpt2-vocab.json", None),
    ],
)
def test_merges_are_found_beside_the_vocabulary(tmp_path: Path, present: list, vocabulary: str, merges) -> None:
    for name in present:
        (tmp_path / name).touch()
    expected = merges and str(tmp_path / merges)
    words = f"{GPT2_WORDS} --vocab-file {tmp_path / vocabulary}"
    assert tokenizer_files("GPT2BPETokenizer", str(tmp_path / vocabulary), None, None)[1] == expected
    assert tokenizer_files("GPT2BPETokenizer", str(tmp_path / vocabulary), "own", None)[1] == "own"
    assert tokenizer_files("WhitespaceTokenizer", str(tmp_path / vocabulary), None, None)[1] is None
    assert TokenizerFiles(str(tmp_path / vocabulary)).of_kind("GPT2BPETokenizer")[1] == expected
    if merges is None:
        with pytest.raises(ConfigError, match="--merge-file is required with --tokenizer-type GPT2BPETokenizer"):
            parse_run(words.split(), CPU)
    else:
        assert parse_run(words.split(), CPU) == parse_run([*words.split(), "--merge-file", expected], CPU)


def test_a_folder_stands_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    data = parse_run([*GPT2_WORDS.split(), "--tokenizer-model", folder], CPU).data
    assert (data.vocab_file, data.merge_file) == (f"{folder}/vocab.json", f"{folder}/merges.txt")
    data = parse_run([*BERT_WORDS.split(), "--tokenizer-model", folder], CPU, BERT).data
    assert (data.vocab_file, data.merge_file) == (f"{folder}/vocab.txt", None)
    words = ["--hidden-size", "64", "--num-layers", "2", "--num-attention-heads", "4", "--seq-length", "32"]
    words += ["--global-batch-size", "4", "--tokenizer-model", folder]
    assert not {"vocab_file", "merge_file"} & make_request(words, Machine(DEVICES["a100"], 2), 2).given.keys()
    assert complaints(f"--tokenizer-model {folder}") == [
        f"--tokenizer-model {folder} and --vocab-file vocab.json exclude each other: give one",
        f"--tokenizer-model {folder} and --merge-file merges.txt exclude each other: give one",
    ]
    with pytest.raises(ConfigError, match=f"--tokenizer-model {folder} and --vocab-file a exclude each other"):
        TokenizerFiles("a", None, folder).of_kind("GPT2BPETokenizer")


def test_a_folder_without_the_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "notes").touch()
    cases = {
        str(tmp_path / "none"): "no such folder; name the folder with vocab.json and merges.txt",
        str(file): "a file; name the folder with vocab.json and merges.txt",
        str(tmp_path): "no vocab.json and no merges.txt in it; GPT2BPETokenizer reads vocab.json and merges.txt",
    }
    for folder, problem in cases.items():
        monkeypatch.setattr(sys, "argv", f"x --input {file} --output-prefix out --tokenizer-model {folder}".split())
        for check in (lambda folder=folder: check_tokenizer_folder("GPT2BPETokenizer", folder), preprocess_data.main):
            with pytest.raises(DataError) as caught:
                check()
            assert caught.value.messages == [f"--tokenizer-model {folder}: {problem}"]
    os.mkfifo(tmp_path / "tokenizer.json")
    assert tokenizer_kind(None, str(tmp_path)) == HUGGINGFACE
    with pytest.raises(DataError, match=f"{tmp_path}/tokenizer.json: is no file"):
        build_tokenizer(HUGGINGFACE, f"{tmp_path}/tokenizer.json", None)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(DataError, match="no vocab.txt in it; its tokenizer.json is not what BertWordPieceCase reads"):
        check_tokenizer_folder("BertWordPieceCase", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--vocab-file", "v"])
    with pytest.raises(ConfigError, match="and --vocab-file or --merge-file exclude each other: give one"):
        preprocess_data.main()


@pytest.mark.parametrize(
    "chosen, present, expected",
    [
        (None, ["tokenizer.json", "tokenizer.model"], (HUGGINGFACE, "tokenizer.json")),
        (None, ["tokenizer.model"], (SENTENCEPIECE, "tokenizer.model")),
        (None, ["tokenizer.json", "vocab.json", "merges.txt"], ("GPT2BPETokenizer", "vocab.json")),
        (HUGGINGFACE, ["tokenizer.json", "vocab.json", "merges.txt"], (HUGGINGFACE, "tokenizer.json")),
        ("Llama2Tokenizer", ["tokenizer.json", "tokenizer.model"], (SENTENCEPIECE, "tokenizer.model")),
    ],
)
def test_a_published_tokenizer_is_found_by_its_files(tmp_path: Path, chosen, present: list, expected: tuple) -> None:
    for name in present:
        (tmp_path / name).touch()
    kind, name = expected
    words = [*GPT2_WORDS.split(), *(["--tokenizer-type", chosen] if chosen else [])]
    for model in (str(tmp_path), str(tmp_path / name)):
        if model == str(tmp_path) or kind != "GPT2BPETokenizer":
            data = parse_run([*words, "--tokenizer-name-or-path", model], CPU).data
            assert (data.tokenizer_type, data.vocab_file) == (kind, str(tmp_path / name))
            check_tokenizer_folder(kind, model)


def test_a_published_tokenizer_needs_its_file(tmp_path: Path) -> None:
    words = f"{GPT2_WORDS} --tokenizer-type HuggingFaceTokenizer"
    cases = {
        words: "--tokenizer-model is required with --tokenizer-type HuggingFaceTokenizer",
        f"{GPT2_WORDS} --vocab-file {__file__} --merge-file m --eod-token x": "--eod-token needs --tokenizer-type",
        f"{BERT_WORDS} --tokenizer-type HFTokenizer --tokenizer-model x": "HuggingFaceTokenizer does not suit BERT",
    }
    for line, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            parse_run(line.split(), CPU, BERT if "BERT" in message else GPT2)
    assert tokenizer_kind(None, str(tmp_path)) == "GPT2BPETokenizer"
    (tmp_path / "tokenizer.model").touch()
    for model, problem in {
        "org/model": "no such folder; .* no files are downloaded",
        str(tmp_path): "no tokenizer.json",
    }.items():
        with pytest.raises(DataError, match=f"--tokenizer-model {model}: {problem}"):
            check_tokenizer_folder(HUGGINGFACE, model)
    with pytest.raises(DataError, match="what GPT2BPETokenizer reads; use --tokenizer-type GPTS"):
        check_tokenizer_folder("GPT2BPETokenizer", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "is_gpt2s"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, True),
        ({"type": "ByteLevel", "add_prefix_space": True}, False),
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}, False),
        ({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}, False),  # as SmolLM2's
        (None, False),
    ],
)
def test_a_folder_whose_tokenizer_json_is_no_bpe_of_gpt2(tmp_path: Path, words: object, is_gpt2s: bool) -> None:
    vocab_file = str(tmp_path / "vocab.json")
    assert not other_words("GPT2BPETokenizer", vocab_file)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": None, "pre_tokenizer": words}))
    assert bool(other_words("GPT2BPETokenizer", vocab_file)) != is_gpt2s
    assert not other_words(HUGGINGFACE, str(tmp_path / "tokenizer.json"))
