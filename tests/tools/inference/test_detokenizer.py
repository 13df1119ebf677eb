"""Text that comes token by token."""

import pytest

from megatron.tokenizer import build_tokenizer
from megatron.tools.inference.continuous_batch import Detokenizer

SAID = "naïve 日本語 🙂🙂 und so weiter\n\nEnde"


@pytest.fixture(scope="module")
def tokenizer(foreign):
    return build_tokenizer("GPT2BPETokenizer", str(foreign / "vocab.json"), str(foreign / "merges.txt"))


def _pieces(tokenizer, text: str, stop: tuple[str, ...] = (), prompt: str = "Also: ") -> list[str]:
    stream = Detokenizer(tokenizer, tokenizer.tokenize(prompt), stop)
    pieces = []
    for token in tokenizer.tokenize(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def test_pieces_are_whole_characters(tokenizer):
    pieces = _pieces(tokenizer, SAID)
    assert "".join(pieces) == SAID
    assert "" in pieces and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "🙂" in pieces, "complete as soon as its last byte is there"


def test_half_a_character_at_the_end_is_replaced(tokenizer):
    stream = Detokenizer(tokenizer, [])
    half = tokenizer.tokenize("🙂")[:-1]
    assert [stream.push(token) for token in half] == [""] * len(half)
    assert stream.finish() == tokenizer.detokenize(half)


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (("\n\n",), "naïve 日本語 🙂🙂 und so weiter"),
        (("weit", "und s"), "naïve 日本語 🙂🙂 "),
        (("Ende!", "🙂 🙂"), SAID),
        (("naïve",), ""),
    ],
)
def test_stop_string_is_never_part_of_the_text(tokenizer, stop, left):
    pieces = _pieces(tokenizer, SAID, stop)
    assert "".join(pieces) == left


def test_possible_stop_string_is_delayed(tokenizer):
    stream = Detokenizer(tokenizer, [], ("abc",))
    lines = [stream.push(token) for token in tokenizer.tokenize("xab")]
    assert "".join(lines) == "x"
    assert "".join(stream.push(token) for token in tokenizer.tokenize("d")) == "abd"
