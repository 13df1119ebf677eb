"""How a token is chosen from logits, how long a text may become, and text that comes token by token."""

import numpy as np
import pytest
import torch

from megatron.common.errors import ConfigError
from megatron.tokenizer import build_tokenizer
from megatron.tools.inference.continuous_batch import Detokenizer
from megatron.tools.inference.decoding import NOT_FINITE, Row, Sampling, choose, nucleus, sample_generator
from megatron.tools.inference.prompts import StoppingCriteria, checked_length

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def _chosen(sampling: Sampling, draws: int = 400, logits: torch.Tensor = LOGITS) -> set[int]:
    rows = [Row(sampling, np.random.default_rng(0))] * draws
    return set(choose(logits.expand(draws, -1), rows))


def test_top_k_and_top_p():
    assert _chosen(Sampling(greedy=True)) == {1}
    assert _chosen(Sampling(temperature=5.0)) == {0, 1, 2, 3, 4}
    assert _chosen(Sampling(temperature=5.0, top_k=2)) == {1, 3}
    # Probabilities are 0.64, 0.24, 0.09, 0.03, 0.01: the first two hold 0.8, and one of them does not.
    assert _chosen(Sampling(top_p=0.8)) == {1, 3}
    assert _chosen(Sampling(top_p=0.5)) == {1}
    assert _chosen(Sampling(temperature=0.01)) == {1}
    # As in transformers, tokens as likely as the last of the most likely ones are among them, but not for top-p.
    assert _chosen(Sampling(top_k=2), logits=torch.tensor([1.0, 1.0, 0.0, 1.0])) == {0, 1, 3}
    assert len(_chosen(Sampling(top_p=0.5), logits=torch.zeros(4))) == 2
    assert _chosen(Sampling(min_p=0.3)) == {1, 3} and _chosen(Sampling(min_p=0.1)) == {1, 2, 3}


@pytest.mark.parametrize(
    "settings, token",
    [({}, 1), ({"presence_penalty": 1.1}, 3), ({"presence_penalty": 0.9}, 1), ({"frequency_penalty": 0.51}, 3)],
)
def test_penalties_are_for_tokens_of_the_completion(settings: dict, token: int):
    sampling = Sampling(greedy=True, **settings)
    rows = [Row(sampling, np.random.default_rng(0), (1, 1), generated) for generated in ((), (1, 1))]
    assert choose(LOGITS.expand(2, -1), rows) == [1, token]


def test_frequencies_are_the_probabilities():
    row = Row(Sampling(), np.random.default_rng(0))
    draws = torch.tensor(choose(LOGITS.expand(4000, -1), [row] * 4000))
    shares = torch.bincount(draws, minlength=5) / 4000
    torch.testing.assert_close(shares, LOGITS.softmax(0), atol=0.03, rtol=0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_the_most_likely_tokens_of_a_large_vocabulary(spread: float):
    """Many of them where probabilities are nearly equal, and few where they are not."""
    probabilities = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * spread + 1e-3).softmax(0)
    ordered, index = probabilities.sort(descending=True)
    expected = torch.zeros(1000).index_copy(0, index, ordered * (ordered.cumsum(0) - ordered < 0.9))
    assert expected.count_nonzero() in {0.0: range(899, 903), 1.0: range(300, 700), 20.0: range(1, 20)}[spread]
    kept = nucleus(probabilities, 0.9)
    assert kept.count_nonzero() == expected.count_nonzero() and (spread == 0 or kept.equal(expected))


SETTINGS = [{}, {"top_p": 0.9}, {"top_k": 2}, {"top_k": 2, "top_p": 0.9}, {"greedy": True}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_logits_that_are_not_finite_are_known(settings: dict):
    """And do no harm to other rows."""
    logits = torch.stack([LOGITS, LOGITS])
    logits[0, 3] = torch.nan
    rows = [Row(Sampling(**settings), np.random.default_rng(0), (1,)) for _ in range(2)]
    bad, good = choose(logits, rows)
    assert bad == NOT_FINITE and good in range(5)


def test_a_token_does_not_depend_on_other_rows():
    """Each row has its own parameters, random numbers and tokens before."""
    logits = torch.randn(2 * len(SETTINGS), 1000, generator=torch.Generator().manual_seed(1))
    every = [Sampling(**settings, temperature=0.8) for settings in SETTINGS for _ in range(2)]

    def rows() -> list[Row]:
        return [Row(each, np.random.default_rng(n), range(n)) for n, each in enumerate(every)]

    alone = [choose(logits[n : n + 1], [row])[0] for n, row in enumerate(rows())]
    before = logits.clone()
    assert choose(logits, rows()) == alone and logits.equal(before)


@pytest.mark.parametrize("temperature", [1e-45, 1e-320, 1e-7, 1e300])
def test_extreme_temperatures_choose_the_limit(temperature: float):
    assert _chosen(Sampling(temperature=temperature)) == ({1} if temperature < 1 else {0, 1, 2, 3, 4})


@pytest.mark.parametrize("other", [(2, [5, 6], 0), (1, [5, 7], 0), (1, [5, 6], 1)], ids=["seed", "prompt", "sample"])
def test_random_numbers_depend_on_seed_prompt_and_sample(other):
    first, again, another = (sample_generator(*key) for key in ((1, [5, 6], 0), (1, [5, 6], 0), other))
    drawn = [stream.random(4).tolist() for stream in (first, again, another)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("settings", "prompt", "longest"),
    [
        ({}, 90, 100),  # by default up to the context
        ({"slides": True}, 90, 154),
        ({"new_tokens": 5}, 95, 100),
        ({"out_seq_length": 100}, 10, 100),
        ({"out_seq_length": 50, "new_tokens": 5}, 48, 50),
        ({"out_seq_length": 300, "slides": True}, 200, 300),
    ],
)
def test_the_nearest_limit_counts(settings, prompt, longest):
    assert checked_length([1] * prompt, StoppingCriteria(context=100, **settings)) == longest


@pytest.mark.parametrize(
    ("settings", "prompt", "words"),
    [
        ({}, 0, "the prompt is empty"),
        ({}, 100, "a prompt of 100 tokens and 1 new ones exceed the 100"),
        ({"out_seq_length": 50}, 50, "--out-seq-length 50 leaves none"),
        ({"out_seq_length": 50, "slides": True}, 51, "--out-seq-length 50 leaves none"),
    ],
)
def test_too_long_prompts_are_refused(settings, prompt, words):
    with pytest.raises(ConfigError, match=words):
        checked_length([1] * prompt, StoppingCriteria(context=100, **settings))


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


@pytest.mark.parametrize(("stop", "text"), [((), "xab"), (("<|endoftext|>",), "x"), (("<|endoftext|>never",), "xab")])
def test_special_tokens_are_not_written_in_a_chat(tokenizer, stop, text):
    stream = Detokenizer(tokenizer, [], stop, hidden=("<|endoftext|>",))
    tokens = [*tokenizer.tokenize("x"), tokenizer.eod, *tokenizer.tokenize("ab")]
    assert "".join([*map(stream.push, tokens), stream.finish()]).startswith(text) and stream.stopped == (text == "x")
