"""What a model can be tried on: which samples a file gives, and what their scores come to. No torch here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config.errors import ConfigError, NumericsError
from megatron.tokenizer import Tokenizer
from megatron.tools.evaluation.reading import (
    count_words,
    detokenize_wikitext,
    read_lines,
    read_text,
    read_tokens,
    refused_as_usage,
)


class Sample(NamedTuple):
    """Tokens in a row, and how many of the last are to be predicted from all before them."""

    tokens: np.ndarray
    """Integers [n + 1]: the model sees the first n."""
    predicted: int
    """From 1 to n."""


class Windows(Sequence[Sample]):
    """One long text in windows of ``size`` inputs, each ``stride`` behind the one before; made when asked for.

    Every token but the first of all is predicted exactly once: the first window predicts all it can, each
    later one the ``stride`` tokens that are new in it, so that they have at least ``size - stride`` before them.
    """

    def __init__(self, tokens: np.ndarray, *, size: int, stride: int):
        assert 1 <= stride <= size
        self._tokens, self._size, self._stride = tokens, size, stride
        self.predicted = max(len(tokens) - 1, 0)
        """Tokens that the windows predict, all together."""

    def __len__(self) -> int:
        return 1 + math.ceil(max(self.predicted - self._size, 0) / self._stride) if self.predicted else 0

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._stride
        end = min(start + self._size, self.predicted)
        seen_before = start + self._size - self._stride if number else 0
        return Sample(self._tokens[start : end + 1], end - seen_before)


def last_inputs(tokens: Sequence[int], predicted: int, size: int) -> Sample:
    """The sample of ``tokens`` with the last ``size`` inputs that a model can see."""
    return Sample(np.asarray(tokens[-(size + 1) :]), predicted)


Figure = int | float | None
_COMPRESSED = (".gz", ".zst")
_OF_MANY = (".jsonl", ".json", ".parquet")
"""Endings of files that hold many texts."""


@dataclass(frozen=True)
class Request:
    """A file, and how it is to be read."""

    path: Path
    """A file of text; for PPL also the prefix of a data set."""
    seq_length: int
    """Tokens that the model sees at most."""
    stride: int
    """New tokens in each window of a text that is longer."""
    strict: bool = False
    """Whether LAMBADA asks for the whole last word, not its last token."""
    key: str = "text"
    """What to read of the objects of a JSONL file."""


class Scores(NamedTuple):
    """What a model made of each of n samples."""

    nll: np.ndarray
    """Negative log-likelihood of all its predicted tokens, in nats: float64 [n]."""
    right: np.ndarray
    """Whether each of them was the likeliest: bool [n]."""


class Task(NamedTuple):
    """Samples, and what their scores come to."""

    samples: Sequence[Sample]
    figures: Callable[[Scores], Mapping[str, Figure]]


def make_task(name: str, request: Request, tokenizer: Tokenizer) -> Task:
    """The task ``name`` of ``TASKS`` on a file. Raises ConfigError for a file that is missing or of no use."""
    return TASKS[name](request, tokenizer)


def _lambada(request: Request, tokenizer: Tokenizer) -> Task:
    """The last word, or the last token, of each passage."""
    split = _last_word if request.strict else _last_token
    lines = read_lines(request.path, request.key)
    passages = [(line.where, *split(line.where, line.text, tokenizer)) for line in lines]
    for where, tokens, predicted in passages:
        if not 0 < predicted < len(tokens) or predicted > request.seq_length:
            raise ConfigError(
                f"{where}: {len(tokens) - predicted} tokens and {predicted} to predict from them; give a passage of "
                f"two words or more, the last of them of at most {request.seq_length} tokens"
            )
    samples = [last_inputs(tokens, predicted, request.seq_length) for _, tokens, predicted in passages]
    cut = sum(len(tokens) - 1 > request.seq_length for _, tokens, _ in passages)
    return Task(samples, partial(_lambada_figures, cut))


def _last_token(where: str, text: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    return _tokenize(where, text, tokenizer), 1


def _last_word(where: str, text: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """As Megatron cuts it: what is before the last word, without blanks at its ends, and a blank with the word."""
    word = (text.split() or [""])[-1]
    before = _tokenize(where, text[: text.rfind(word)].strip(), tokenizer)
    target = _tokenize(where, f" {word}", tokenizer)
    return before + target, len(target)


def _lambada_figures(cut: int, scores: Scores) -> dict[str, Figure]:
    right, count = int(scores.right.sum()), len(scores.right)
    return {
        "accuracy": right / count,
        "perplexity": _perplexity(_total(scores), count),
        "right": right,
        "passages": count,
        "passages_cut": cut,
    }


def _wikitext(request: Request, tokenizer: Tokenizer) -> Task:
    """All of a file of WikiText as one text, normalised by the words it has there."""
    text = read_text(request.path)
    tokens = np.array(_tokenize(str(request.path), detokenize_wikitext(text), tokenizer))
    return _text_task(request, tokens, {"word": count_words(text), "byte": len(text.encode())})


def _perplexity_of_any(request: Request, tokenizer: Tokenizer) -> Task:
    """A text as it is; the texts of a JSONL or Parquet file, or the documents of a data set, one behind the other."""
    path = request.path
    if not path.is_file():
        if path.with_name(f"{path.name}.idx").exists():
            return _text_task(request, read_tokens(path, tokenizer.vocab_size), {})
        raise ConfigError(f"{path}: no such file, nor {path.name}.bin and {path.name}.idx; name a text or a data set")
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    if name.suffix in _OF_MANY:
        lines = [line for line in read_lines(path, request.key) if line.text]
        ids = [id for line in lines for id in (*_tokenize(line.where, line.text, tokenizer), tokenizer.eod)]
        text = "\n".join(line.text for line in lines)
    else:
        text = read_text(path)
        ids = _tokenize(str(path), text, tokenizer)
    return _text_task(request, np.array(ids), {"word": len(text.split()), "byte": len(text.encode())})


def _text_task(request: Request, tokens: np.ndarray, units: Mapping[str, int]) -> Task:
    windows = Windows(tokens, size=request.seq_length, stride=request.stride)
    if not len(windows):
        raise ConfigError(f"{request.path}: {len(tokens)} tokens, from which nothing can be predicted; give a text")
    return Task(windows, partial(_text_figures, windows, {unit: count for unit, count in units.items() if count}))


def _text_figures(windows: Windows, units: Mapping[str, int], scores: Scores) -> dict[str, Figure]:
    nll = _total(scores)
    return {
        "loss": nll / windows.predicted,
        "perplexity": _perplexity(nll, windows.predicted),
        **{f"{unit}_perplexity": _perplexity(nll, count) for unit, count in units.items()},
        "tokens": windows.predicted,
        **{f"{unit}s": count for unit, count in units.items()},
        "windows": len(windows),
    }


TASKS: dict[str, Callable[[Request, Tokenizer], Task]] = {
    "LAMBADA": _lambada,
    "WIKITEXT": _wikitext,
    "PPL": _perplexity_of_any,
}


def _tokenize(where: str, text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        with refused_as_usage():
            return tokenizer.tokenize(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _total(scores: Scores) -> float:
    """Nats of all samples: one sum, whoever computed which. Raises NumericsError where it is not finite."""
    nll = math.fsum(scores.nll)
    if not math.isfinite(nll):
        bad = int(np.argmin(np.isfinite(scores.nll)))
        raise NumericsError(f"sample {bad} has the loss {scores.nll[bad]}: the weights, or their type, are at fault")
    return nll


def _perplexity(nll: float, count: int) -> float | None:
    """exp(nll / count); None where no number is so large."""
    try:
        return math.exp(nll / count)
    except OverflowError:
        return None
