"""Where sentences end."""

import pytest

from megatron.tools.preprocess.tokenize_chunk import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One.", "Two!", "Three?", "Four...", "And five."],
        ["Mr. Smith met Dr. J. R. Who, Ph.D. and others, on 3.11 at noon.", "They left."],
        ['"Really?" she asked.', '"Yes!"', "(See Fig. 3, e.g. its left half.)", "It is so."],
        ["It costs 3.50, or 4.", "12 cost more."],
        ["An item.", "`code()` is next."],
        ["He said no.", "So did I.", "I did."],
        ["Élan vital.", "Über alles."],
    ],
)
def test_split_sentences(sentences: list[str]):
    assert split_sentences(" ".join(sentences)) == sentences


def test_an_empty_line_ends_a_sentence():
    assert split_sentences("A title\n \n- an item.\nmore of it") == ["A title", "- an item.\nmore of it"]


@pytest.mark.parametrize(
    "text",
    ["  A b c.  D.E.F. is g!\n\n\nH i.\n", "\n \nA title\n \n\n- an item.\nMore.", "例えば。\n\n次です！はい。 ", "a"],
)
def test_white_space_between_sentences_is_kept_on_request(text: str):
    sentences = split_sentences(text, keep_newlines=True)
    assert "".join(sentences) == text
    assert [sentence.strip() for sentence in sentences] == split_sentences(text) and all(map(str.strip, sentences))


def test_runs_of_stops_and_long_words_take_linear_time():
    """A second, where the square of their length would take an hour."""
    stops, word = "." * 300_000, "x" * 300_000
    assert split_sentences(f"{stops}x y. Z") == [f"{stops}x y.", "Z"]
    assert split_sentences(f"{word} Dr. A. {word} b.") == [f"{word} Dr. A. {word} b."]
