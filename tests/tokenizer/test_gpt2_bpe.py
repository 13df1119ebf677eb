"""The byte-level BPE: any text comes back unchanged, the eod comes from no text, and broken files are named."""

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import tokenizers

from megatron.common.errors import DataError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe

EOD = "<|endoftext|>"
CORPUS = ["the cat sat on the mat", "the hat of the cat", "naïve café 日本語", EOD * 5] * 3

ODD_TEXTS = [
    "",
    " ",
    "\n\n\t  trailing blanks \r\n",
    "don't you're we'll",
    "naïve e\u0301 \u00e9",
    "日本語のテキスト",
    "👩\u200d👩\u200d👧 \U0010ffff",
    "\x00\x01\x7f\x85\xa0\xad",
    "\ufeffBOM \u2028 \u2029 \ufffd \ufffe",
    "שלום \u202eעברית",
    f"{EOD}{EOD} a {EOD}",
    "#version: 0.2",
]

CUT_HERE = "  \n\n\t\r''tsmdaaz09.-"
ODD_BLANKS = "\x1c\x85\xa0\u1680\u180e\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
"""Characters that some programs take for blanks, and others not."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt of a BPE of 300 tokens."""
    vocabulary, merges = train_gpt2_bpe(CORPUS, vocab_size=300, min_frequency=2)
    vocab_file, merge_file = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")
    merge_file.write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return vocab_file, merge_file


@pytest.fixture
def tokenizer(files: tuple[Path, Path]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*map(str, files))


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_detokenize_restores_any_text(tokenizer: GPT2BPETokenizer, text: str):
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("with_gigatoken", [True, False])
def test_batches_equal_those_of_the_library(files: tuple[Path, Path], monkeypatch, with_gigatoken: bool) -> None:
    """Texts made of all characters at which the cut into words could go wrong."""
    vocabulary, merges = (path.read_text(encoding="utf-8") for path in files)
    pairs = [tuple(line.split(" ")) for line in merges.splitlines()[1:]]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(json.loads(vocabulary), pairs))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not with_gigatoken:
        monkeypatch.setitem(sys.modules, "gigatoken", None)  # as if it were not installed
    tokenizer, draw = GPT2BPETokenizer(*map(str, files)), random.Random(1)
    characters = [*map(chr, range(128)), *CUT_HERE * 3, *ODD_BLANKS, *"é“”一ªſ²½Ⅷ٣\u0301\u200d😀\xad"]
    for _ in range(300):
        texts = ["".join(draw.choices(characters, k=draw.randint(0, 15))) for _ in range(40)]
        expected = [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]
        assert tokenizer.tokenize_batch(texts) == expected
        assert [ids.tolist() for ids in tokenizer.tokenize_arrays(texts)] == expected
    assert (tokenizer._gigatoken is not None) is with_gigatoken


def test_threads_use_gigatoken_in_turns(tokenizer: GPT2BPETokenizer) -> None:
    """It refuses some of them otherwise."""
    used = Lock()

    class Library:
        def encode(self, text: str) -> np.ndarray:
            assert used.acquire(blocking=False), "two at once"
            time.sleep(1e-3)
            used.release()
            return np.array([len(text)])

    tokenizer._gigatoken._library = Library()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(tokenizer.tokenize, ["a", "of"] * 20)) == [[1], [2]] * 20


def test_no_text_spells_the_end_of_a_document(tokenizer: GPT2BPETokenizer):
    assert tokenizer.eod == tokenizer.vocab_size - 1
    for text in (EOD, f"a{EOD}b", f" {EOD} ", EOD * 3):
        assert tokenizer.eod not in tokenizer.tokenize(text)
    assert tokenizer.detokenize([*tokenizer.tokenize("the"), tokenizer.eod]) == "the" + EOD


def test_half_a_surrogate_pair_is_a_data_error(tokenizer: GPT2BPETokenizer):
    with pytest.raises(DataError, match=r"character 2 of the text is U\+D800, half of a surrogate pair"):
        tokenizer.tokenize_batch(["fine", "ab\ud800"])


@pytest.mark.parametrize("id", [-1, 300])
def test_an_id_outside_the_vocabulary_is_a_data_error(tokenizer: GPT2BPETokenizer, id: int):
    assert tokenizer.vocab_size == 300
    with pytest.raises(DataError, match=f"token {id} is not in the vocabulary of 300 tokens"):
        tokenizer.detokenize([0, id])


def test_all_absent_files_are_named_at_once(files: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(DataError) as caught:
        build_tokenizer("GPT2BPETokenizer", None, str(tmp_path / "nowhere.txt"))
    assert len(caught.value.messages) == 2
    assert "--vocab-file is missing" in caught.value.messages[0]
    assert f"--merge-file {tmp_path / 'nowhere.txt'}: no such file" in caught.value.messages[1]


def broken_vocabularies() -> dict[str, tuple[bytes, str]]:
    vocabulary, _ = train_gpt2_bpe(CORPUS, vocab_size=300, min_frequency=2)

    def without(token: str) -> bytes:
        rest = [other for other in vocabulary if other != token]
        return json.dumps({other: id for id, other in enumerate(rest)}).encode()

    return {
        "not JSON": (b'{"a": 0,\n "b" 1}', r"vocab\.json:2: not JSON"),
        "not UTF-8": (b'{"\xff": 0}', r"byte 2 is not UTF-8"),
        "not a table": (b'["a", "b"]', r"a JSON list"),
        "not an integer": (json.dumps(vocabulary | {"the": "7"}).encode(), r"the id of 'the' is '7'"),
        "an id twice": (json.dumps(vocabulary | {"the": 0}).encode(), rf"no token has {vocabulary['the']}$"),
        "an id too large": (
            json.dumps(vocabulary | {EOD: 300}).encode(),
            r"need the ids 0 to 299, .* no token has 299",
        ),
        "no end of document": (without(EOD), r"lacks <\|endoftext\|>; add it with the id 299"),
        "a byte without a token": (without("~"), r"1 of the 256 byte symbols have no token, '~'"),
        "half a character": (json.dumps(vocabulary | {"\ud800": 300}).encode(), r"a token holds U\+D800, half of a"),
        "of other merges": (without("the"), r"merges\.txt:\d+: merge '.*' needs the token 'the'"),
    }


@pytest.mark.parametrize("fault", broken_vocabularies())
def test_a_broken_vocabulary_is_one_line(files: tuple[Path, Path], fault: str):
    content, expected = broken_vocabularies()[fault]
    files[0].write_bytes(content)
    with pytest.raises(DataError, match=expected) as caught:
        GPT2BPETokenizer(*map(str, files))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("the", r"merges\.txt:3: 'the' is not a merge"),
        ("t h e", r"merges\.txt:3: 't h e' is not a merge"),
        ("the ", r"merges\.txt:3: 'the ' is not a merge"),
        ("z z", r"merges\.txt:3: merge 'z z' needs the token 'zz'"),
        ("zz z", r"merges\.txt:3: merge 'zz z' needs the token 'zz'"),
    ],
)
def test_invalid_merge_is_named_with_its_line(files: tuple[Path, Path], line: str, expected: str):
    merges = files[1].read_text(encoding="utf-8").splitlines()
    files[1].write_text("\n".join([*merges[:2], line, *merges[3:]]), encoding="utf-8")
    with pytest.raises(DataError, match=expected):
        GPT2BPETokenizer(*map(str, files))


def test_files_with_windows_line_ends_and_without_a_version_are_read(
    tokenizer: GPT2BPETokenizer, files: tuple[Path, Path]
):
    merges = files[1].read_text(encoding="utf-8").splitlines()[1:]
    files[1].write_bytes("\r\n".join(merges).encode("utf-8"))
    again = GPT2BPETokenizer(*map(str, files))
    assert again.tokenize(CORPUS[0]) == tokenizer.tokenize(CORPUS[0])
