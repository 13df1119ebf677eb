"""Tokenizers that are published with models: a tokenizer.json gives the ids of transformers, a SentencePiece model its
own."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from support.command_lines import CPU
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron.cli import parse_run
from megatron.common.errors import DataError
from megatron.common.tokenizer_files import HUGGINGFACE, SENTENCEPIECE, TOKENIZER_FILES
from megatron.data.fingerprint import tokenizer_hash
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.tokenizer import build_tokenizer
from megatron.tools.chat.tokens import Text, tokenize_texts
from megatron.tools.inference.continuous_batch import Detokenizer
from megatron.tools.inference.prompts import prompt_tokens
from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess
from megatron.training.preflight import check

STRINGS = 1500
CORPUS = [
    "The quick brown fox's 12345 jumps\n\n over   naïve façades. ",
    "日本語のテキスト 🙂🙂 и по-русски, ٣٤٥! ",
    "def f(x):\n\treturn x+1\r\n",
]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>"]


def _byte_level() -> tokenizers.Tokenizer:
    """As Llama 3 and Qwen: words by a regular expression, special tokens after the others, one added token that is
    not special, and a beginning that the post-processor adds."""
    encoder = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    encoder.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), "isolated")
    encoder.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet))
    encoder.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    encoder.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    encoder.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [(SPECIAL[0], 350)])
    return encoder


def _byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: no words, blanks as U+2581, and bytes for characters that are not in the vocabulary."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.train_from_iterator([f"▁{CORPUS[0]}".replace(" ", "▁")], trainers.BpeTrainer(vocab_size=90))
    model = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys([*first, *model["vocab"]]))}
    merges = [tuple(merge) for merge in model["merges"]]
    encoder = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    encoder.add_special_tokens(first[:3])
    return encoder


MADE = {"byte level": (_byte_level, SPECIAL[1]), "byte fallback": (_byte_fallback, "</s>")}


@pytest.fixture(scope="module", params=MADE)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, end = MADE[request.param]
    folder = tmp_path_factory.mktemp("published")
    make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end, "__type": "AddedToken"}}))
    return folder


def _strings(number: int) -> list[str]:
    """Texts of characters of all planes, with words, numbers, white space and special tokens among them."""
    draw = random.Random(7)
    planes = [(0x20, 0x7F), (0, 0x20), (0xA0, 0x500), (0x600, 0x700), (0x300, 0x370), (0x2000, 0x2100)]
    planes += [(0x3040, 0x9FFF), (0x1F600, 0x1F650), (0xE000, 0x110000)]
    quoted = [*SPECIAL, "<think>", "</s>", "<0x41>", "▁", "don't", "  ", "\r\n", "12345", "\N{REPLACEMENT CHARACTER}"]
    words = [*" ".join(CORPUS).split(" "), *quoted]
    pieces = lambda: draw.choice(words) if draw.random() < 0.5 else chr(draw.randrange(*draw.choice(planes)))  # noqa: E731
    return ["", *("".join(pieces() for _ in range(draw.randrange(1, 24))) for _ in range(number - 1))]


def test_ids_and_text_are_those_of_transformers(folder: Path) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = build_tokenizer(HUGGINGFACE, str(folder / "tokenizer.json"), None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(reference), reference.eos_token_id)
    texts = _strings(STRINGS)
    ids = tokenizer.tokenize_batch(texts)
    assert ids == reference(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert not any(tokenizer.eod in document for document in ids)
    parsed = reference(texts, add_special_tokens=False)["input_ids"]
    assert parsed != ids and parsed == [prompt_tokens(text, tokenizer) for text in texts]
    special = {str(token): id for id, token in reference.added_tokens_decoder.items() if token.special}
    assert tokenizer.special_tokens == special
    draw = random.Random(8)
    ids = parsed + [[draw.randrange(len(reference)) for _ in range(12)] for _ in range(STRINGS)]
    assert [tokenizer.detokenize(document) for document in ids] == [reference.decode(document) for document in ids]


def _streamed(tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer, prompt)
    return [*(stream.push(id) for id in ids), stream.finish()]


def test_streamed_text_is_whole(folder: Path) -> None:
    tokenizer = build_tokenizer(HUGGINGFACE, str(folder / "tokenizer.json"), None)
    for text in _strings(200):
        ids = tokenizer.tokenize(text)
        assert "".join(_streamed(tokenizer, [], ids)) == tokenizer.detokenize(ids)
    ids = tokenizer.tokenize("a 日🙂 b")
    pieces = _streamed(tokenizer, tokenizer.tokenize("so it"), ids)
    assert "".join(pieces).strip() == "a 日🙂 b" and "日" in pieces and "🙂" in pieces and "" in pieces[1:-1]


def test_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(text.replace("\n", " ") for text in CORPUS * 20))
    path = str(tmp_path / "tokenizer.model")
    sentencepiece.SentencePieceTrainer.Train(
        input=str(tmp_path / "corpus.txt"), model_prefix=path.removesuffix(".model"), vocab_size=340, model_type="bpe",
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    tokenizer = build_tokenizer(SENTENCEPIECE, path, None)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (340, 1, 2)
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    for text in ("The quick 日本🙂 fox", "quoted </s> and <s>", "", " two  blanks"):
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text and not {1, 2} & set(ids)
        assert "".join(_streamed(tokenizer, [], ids)) == text
    text = "The quick fox</s>The brown fox"  # counted from the middle on, and up to the middle
    whole = [*tokenizer.tokenize(text[:13]), 2, *tokenizer.tokenize(text[17:])]
    [(ids, mask)] = tokenize_texts(tokenizer, [Text(text, [(9, 20), (26, 30)])])
    counted = [id for id, counts in zip(ids, mask, strict=True) if counts]
    assert ids == whole and tokenizer.detokenize(counted).split() == ["fox", "The", "fox"]
    assert tokenizer.detokenize([2]) == "" == build_tokenizer(SENTENCEPIECE, path, None, 400).detokenize([399])
    assert build_tokenizer(SENTENCEPIECE, path, None, 400, "<unk>").eod == 0
    for adds in (False, True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds}))
        assert build_tokenizer(SENTENCEPIECE, path, None).adds_bos is adds
    with pytest.raises(DataError, match="character 1 of the text is"):
        tokenizer.tokenize("a\ud800")
    for content in (b"", b"\x80not a model"):
        (tmp_path / "broken.model").write_bytes(content)
        with pytest.raises(DataError, match="broken.model: not a SentencePiece model"):
            build_tokenizer(SENTENCEPIECE, str(tmp_path / "broken.model"), None)
    with pytest.raises(DataError, match="--eod-token nothing is not in the vocabulary"):
        build_tokenizer(SENTENCEPIECE, path, None, None, "nothing")


@pytest.fixture(scope="module")
def encoder() -> tokenizers.Tokenizer:
    return _byte_level()


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_start|>"}, "generation_config.json": {"eos_token_id": 1}}, 352),
        ({"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {"eos_token_id": [351, 352]}}, 351),
        ({"special_tokens_map.json": {"eos_token": {"content": "<think>"}}}, 353),
        ({"config.json": {"eos_token_id": 7}}, 7),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": 0}}, 0),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"354": {"content": "<e>"}}, "eos_token": "<e>"}}, 354),
        ({}, "no file beside it names an eos_token, .*--eod-token, such as <|begin_of_text|> or"),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, r"eos_token '</s>' is not in the vocabulary of"),
        ({"config.json": {"eos_token_id": 354}}, "config.json: eos_token_id 354 is not one of the 354 tokens"),
        ({"config.json": []}, "config.json: a JSON list, not an object"),
        (
            {"tokenizer_config.json": {"eos_token": "<think>"}, "generation_config.json": {"eos_token_id": [[[]]]}},
            "generation_config.json: eos_token_id is ",
        ),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"9": {"content": "<e>"}}}}, "cannot have the id 9"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "its added_tokens_decoder does not fit"),
    ],
)
def test_end_of_a_document(tmp_path: Path, encoder: tokenizers.Tokenizer, files: dict, expected: int | str) -> None:
    path = tmp_path / "tokenizer.json"
    encoder.save(str(path))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if isinstance(expected, int):
        tokenizer, ends = build_tokenizer(HUGGINGFACE, str(path), None), files.get("generation_config.json", {})
        others = ends.get("eos_token_id", expected)
        assert tokenizer.eod == expected and tokenizer.ends - {expected} == {*np.atleast_1d(others)} - {expected}
        chosen = build_tokenizer(HUGGINGFACE, str(path), None, 500, "<think>")
        assert (chosen.eod, chosen.vocab_size, chosen.detokenize([450])) == (353, 500, "")
        hashes = {tokenizer_hash(HUGGINGFACE, str(path), None, eod=eod) for eod in (expected, expected - 1)}
        assert len(hashes) == 2
    else:
        with pytest.raises(DataError, match=expected.replace("|", r"\|")):
            build_tokenizer(HUGGINGFACE, str(path), None)


def test_broken_files(tmp_path: Path, encoder: tokenizers.Tokenizer) -> None:
    path = tmp_path / TOKENIZER_FILES[HUGGINGFACE][0]
    twice = f'{encoder.to_str()[:-1]}, "model": {{}}}}'
    for content in ("", "{}", encoder.to_str()[:900], '{"model": {"type": "New"}}', "[" * 100_000, twice):
        path.write_text(content)
        with pytest.raises(DataError, match="tokenizer.json: not a tokenizer.json") as caught:
            build_tokenizer(HUGGINGFACE, str(path), None)
        assert "\n" not in str(caught.value)
    path.write_text(encoder.to_str())
    with pytest.raises(DataError, match="has 354 tokens, and the embedding of the model 353 rows"):
        build_tokenizer(HUGGINGFACE, str(path), None, 353, "<think>")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="config.json:1: not JSON"):
        build_tokenizer(HUGGINGFACE, str(path), None)


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        ([normalizers.Replace("\u4e16", "a" * 200)], 1000),
        ([normalizers.Replace(tokenizers.Regex("[a-f]"), "x" * 9000)], 45_005),
        ([normalizers.Replace("e", "ee")] * 8, 1280),
        ([normalizers.Replace("a", "b" * 20), normalizers.Replace("b", "c" * 20)], 2000),
        ([normalizers.NFKD(), normalizers.Replace("\n", "<|newline|>"), normalizers.Prepend("\u2581")], 0),
        ([normalizers.Replace("\n", "<|newline|>"), normalizers.Replace("\t", "<|tab|>")], 0),
    ],
)
def test_normalizer_that_lengthens_texts(
    tmp_path: Path, encoder: tokenizers.Tokenizer, steps: list[normalizers.Normalizer], size: int
) -> None:
    path = tmp_path / "tokenizer.json"
    encoder.normalizer = normalizers.Sequence(steps)
    encoder.save(str(path))
    if size:
        with pytest.raises(DataError, match=f"its normalizer and pre_tokenizer make up to {size:,} characters of one"):
            build_tokenizer(HUGGINGFACE, str(path), None, None, "<think>")
    else:
        assert build_tokenizer(HUGGINGFACE, str(path), None, None, "<think>").vocab_size == 354


def test_large_vocabulary(tmp_path: Path) -> None:
    """From text to a run's vocabulary: ids of four bytes, read back; data of two bytes are another tokenizer's."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{id}": id for id in range(3, 70_000)}}
    encoder = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    encoder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "text.txt").write_text("w3 w69999 new w65536\n" * 40)
    kind = {"tokenizer_type": HUGGINGFACE, "vocab_file": str(tmp_path / "tokenizer.json")}
    tokens = {"append_eod": True, "prepend_bos": True}
    job = Job(inputs=(tmp_path / "text.txt",), output_prefix=str(tmp_path / "a"), **kind, **tokens)
    preprocess(job, lambda summary: None, lambda error: None)
    data = IndexedDataset(f"{tmp_path}/a_text_document")
    assert (data.dtype, data.get(0).tolist()) == (np.int32, [1, 3, 69_999, 0, 65_536, 2])
    with IndexedDatasetBuilder(f"{tmp_path}/b", np.dtype(np.uint16)) as builder:
        builder.add_documents(np.full(400, 3), [[40]] * 10)
    line = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --batch-size 1 --train-iters 2 --lr 1 "
    )
    line += f"--split 8,1,1 --tokenizer-model {tmp_path} --vocab-size 70016 --save {tmp_path}/s --data-path {tmp_path}"
    run = check(parse_run(f"{line}/a_text_document".split(), CPU))[0]
    assert (run.model.vocab_size, run.model.padded_vocab_size, run.model.eod_token) == (70_016, 70_016, 2)
    other = check(parse_run(f"{line}/a_text_document --eod-token <s> --override".split(), CPU))[0]
    assert run.data.tokenizer_hash != other.data.tokenizer_hash
    with pytest.raises(DataError, match="b.bin stores tokens as uint16, which does not hold the 70000 tokens of"):
        check(parse_run(f"{line}/b".split(), CPU))
