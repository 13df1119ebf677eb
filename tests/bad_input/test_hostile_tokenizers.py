"""A tokenizer.json at which the library panics, or which expands without end, is refused in a line, with code 3."""

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from megatron.common.errors import ConfigError, DataError, one_line
from megatron.common.processes import failure_in_child
from megatron.common.screen import LossyStream, buffered_stderr, release_stderr
from megatron.tokenizer import growth, published
from megatron.tokenizer.growth import check_growth
from megatron.tokenizer.published import HuggingFaceTokenizer
from megatron.tools.convert.vocabulary import count_tokens
from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess

END = {"content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"}
GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
LIGATURE = {"type": "Replace", "pattern": {"String": "\u0644"}, "content": "\ufdfa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
BEGIN = {"id": "</s>", "ids": [2] * 20_000, "tokens": ["</s>"] * 20_000}
PARTS = [{"SpecialToken": {"id": "</s>", "type_id": 0}}] * 20_000 + [{"Sequence": {"id": "A", "type_id": 0}}]
BEGINNINGS = {"type": "TemplateProcessing", "single": PARTS, "pair": PARTS, "special_tokens": {"</s>": BEGIN}}


def written(folder: Path, changes: dict[str, Any], config: dict[str, Any] | None = None) -> str:
    tree = {"version": "1.0", "added_tokens": [{**END, "id": 2}], "model": WORDS, **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **(config or {})}))
    (file := folder / "tokenizer.json").write_text(json.dumps(tree))
    return str(file)


BROKEN: dict[str, dict[str, Any]] = {
    "a panic": {"model": {**WORDS, "type": "BPE", "merges": ["a b"], "continuing_subword_prefix": "####"}},
    "an abort": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}},
    "an id of 32 bits": {"model": {**WORDS, "vocab": {**WORDS["vocab"], "c": 2**32 - 1}}},
    "an id of 33 bits": {"model": {**WORDS, "vocab": {**WORDS["vocab"], "c": 2**33}}},
    "a text that grows": {"normalizer": {"type": "Sequence", "normalizers": [GROW] * 4}},
    "some letters that grow": {"normalizer": {**GROW, "pattern": {"Regex": "[\u0400-\u04ff]"}}},
    "ligatures of ligatures": {"normalizer": {"type": "Sequence", "normalizers": [LIGATURE, {"type": "NFKC"}] * 3}},
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 20}},
    "a decoder that grows": {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, GROW, GROW]}},
    "blanks between blanks": {"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}},
    "beginnings without end": {"post_processor": BEGINNINGS},
    "a long token": {"model": {**WORDS, "vocab": {**WORDS["vocab"], "c" * 5000: 3}}},
    "two words of one id": {"model": {**WORDS, "vocab": {**WORDS["vocab"], "c": 1}}},
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_the_library_cannot_bear_is_refused(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_MEMORY", 1 << 27)
    with pytest.raises(DataError, match="tokenizer.json") as caught:
        HuggingFaceTokenizer(written(tmp_path, BROKEN[case]))
    assert "complete" not in str(caught.value), "which it is"
    if "not a tokenizer.json" in str(caught.value):
        with pytest.raises(DataError, match="not a tokenizer.json"):  # from-hf does not copy it
            count_tokens(tmp_path)


def charsmap() -> bytes:
    """SentencePiece's table of NFKC."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(["be kind"]), model_writer=(model := io.BytesIO()), vocab_size=10, minloglevel=2
    )
    (proto := ModelProto()).ParseFromString(model.getvalue())
    return proto.normalizer_spec.precompiled_charsmap


def test_published_steps_are_allowed_and_bounds_hold() -> None:
    """The steps of BERT, Llama 2, Llama 3, ALBERT and CLIP; no text grows more than the bound says."""
    n, p, d, blanks = normalizers, pre_tokenizers, decoders, Regex(" {2,}")
    kinds = {
        "bert": ([n.BertNormalizer()], [p.BertPreTokenizer()], [d.WordPiece()]),
        "llama2": ([n.Prepend("_"), n.Replace(" ", "_")], [], [d.Replace("_", " "), d.ByteFallback(), d.Fuse()]),
        "llama3": ([], [p.Split(Regex(r"\w+"), "isolated"), p.ByteLevel()], [d.ByteLevel()]),
        "albert": (
            [
                n.Replace("``", '"'),
                n.NFKD(),
                n.StripAccents(),
                n.Lowercase(),
                n.Precompiled(charsmap()),
                n.Replace(blanks, " "),
            ],
            [p.WhitespaceSplit(), p.Metaspace()],
            [d.Metaspace()],
        ),
        "clip": ([n.NFC(), n.Replace(Regex(r"\s+"), " "), n.Lowercase()], [p.ByteLevel()], [d.ByteLevel()]),
    }
    worst = ["\ufdfa", "\u0130", "\u1f82", "\u4e16\u754c", "\U0001d160", "a  b", "", " ", "\U0001f44d"]
    for before, splits, after in kinds.values():
        encoder = Tokenizer(WordLevel({"a": 0}, "a"))
        encoder.normalizer, encoder.pre_tokenizer = n.Sequence(before), p.Sequence(splits)
        encoder.decoder = d.Sequence(after)
        check_growth(encoder)
    for step in (
        *(step for before, _, _ in kinds.values() for step in before),
        *(
            n.NFKC(),
            n.NFD(),
            n.Replace(Regex("x*"), "yz"),
            n.Replace("", "yz"),
            n.Nmt(),
            n.ByteLevel(),
            n.Prepend("yz"),
        ),
    ):
        bound = growth._bound(json.loads(step.__getstate__()))
        assert all(len(step.normalize_str(text)) < bound * (len(text) + 1) for text in worst), step


def test_a_text_without_tokens_is_an_error_of_the_text(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(file := written(tmp_path, {"model": {**WORDS, "unk_token": "<unk>"}}))
    assert tokenizer.tokenize("a") == [0]
    with pytest.raises(DataError, match=f"cannot encode this text .*{file}"):
        tokenizer.tokenize("c")


def test_special_tokens_that_are_not_added_may_be_missing(tmp_path: Path) -> None:
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    added = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    tokenizer = HuggingFaceTokenizer(written(tmp_path, {"post_processor": added}))
    assert tokenizer.tokenize("a") == [0] and not tokenizer.adds_bos


SLOW = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
TOO_SLOW = "x" * 200


def test_nothing_of_a_panic_is_on_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The expression gives up at a text that the check does not have."""
    tokenizer = HuggingFaceTokenizer(written(tmp_path, {"pre_tokenizer": SLOW}))
    for encode in (tokenizer.tokenize_batch, tokenizer.encode_marked):
        with pytest.raises(DataError, match="cannot encode this text .PanicException"):
            encode([TOO_SLOW])
    assert tokenizer.encode_marked(["</s>"])[0].ids == [2]
    with buffered_stderr():
        os.write(2, b"of another library")
    assert capfd.readouterr().err == "of another library"


def test_preprocessing_names_the_line_that_cannot_be_encoded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, {"pre_tokenizer": SLOW})
    (text := tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("a", TOO_SLOW, "b")))
    job = Job(
        inputs=(text,),
        output_prefix=str(tmp_path / "out"),
        tokenizer_type="HuggingFaceTokenizer",
        vocab_file=model,
        workers=2,
    )
    with pytest.raises(DataError, match=f"{text}:2: the tokenizer cannot encode this text"):
        preprocess(job, lambda _: None, print)
    skipped: list[str] = []
    summary = preprocess(replace(job, skip_errors=True), lambda _: None, skipped.append)
    assert (summary.documents, summary.bad_lines, len(skipped)) == (2, 1, 1)
    assert capfd.readouterr().err == ""


def test_thousands_of_added_tokens_take_no_minute(tmp_path: Path) -> None:
    added = {str(number): {**END, "content": f"<{number}>"} for number in range(3, 20_000)}
    signal.alarm(20)
    assert HuggingFaceTokenizer(written(tmp_path, {}, {"added_tokens_decoder": added})).vocab_size == 20_000
    signal.alarm(0)


def test_a_child_that_never_ends_is_ended() -> None:
    assert failure_in_child(signal.pause, seconds=0.05, most_bytes=1 << 30) == "takes more than 0.05 s"
    assert failure_in_child(lambda: bytearray(1 << 31), seconds=10, most_bytes=1 << 28) == "MemoryError"
    assert failure_in_child(lambda: None, seconds=10, most_bytes=1 << 28) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_never_reach_a_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        LossyStream(stream, "stdout").write("\x1b[2Ja\tb\n\x9b\x07")
    assert (terminal.getvalue(), file.getvalue()) == ("\\x1b[2Ja\tb\n\\x9b\\x07", "\x1b[2Ja\tb\n\x9b\x07")
    assert len(str(ConfigError("x" * 10**6))) < 5000 and one_line("\x1b") == "\\x1b"


def test_last_words_are_not_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    with buffered_stderr():
        os.write(2, b"of a library\n")
        release_stderr()
        os.write(2, b"last words\n")
        assert capfd.readouterr().err == "last words\n"
