"""Evaluation tasks: from a file to samples, whose tokens are predicted, and from scores to metrics. No torch here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.common.errors import ConfigError, NumericsError, counted
from megatron.tokenizer import Tokenizer
from megatron.tools.evaluation.texts import (
    count_words,
    data_errors_as_usage,
    detokenize_wikitext,
    read_lines,
    read_pairs,
    read_text,
    read_tokens,
)
from megatron.tools.preprocess.corpus import uncompressed

Metric = int | float | None
_MANY_TEXTS = (".jsonl", ".json", ".parquet")
"""Endings of files that hold many texts."""


class Sample(NamedTuple):
    """Consecutive tokens, the last of which are predicted, each from all before it."""

    tokens: np.ndarray
    """Integers [n + 1]; the first n are the input."""
    predicted: int
    """Number of predicted tokens, from 1 to n."""
    text: Sequence[int] = ()
    """What an encoder reads, of a model that has one."""


class Windows(Sequence[Sample]):
    """Windows of ``size`` inputs of a long text, each ``stride`` after the one before; computed on demand.

    Every token but the first is predicted exactly once: the first window predicts all of its tokens, each
    later one its ``stride`` new tokens, so that they have at least ``size - stride`` tokens before them.
    """

    def __init__(self, tokens: np.ndarray, *, size: int, stride: int):
        assert 1 <= stride <= size
        self._tokens, self._size, self._stride = tokens, size, stride
        self.predicted = max(len(tokens) - 1, 0)
        """Total number of predicted tokens."""

    def __len__(self) -> int:
        return 1 + math.ceil(max(self.predicted - self._size, 0) / self._stride) if self.predicted else 0

    def __getitem__(self, number: int) -> Sample:  # type: ignore[override]  # slices are not needed
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._stride
        end = min(start + self._size, self.predicted)
        seen_before = start + self._size - self._stride if number else 0
        return Sample(self._tokens[start : end + 1], end - seen_before)


def last_inputs(tokens: Sequence[int], predicted: int, size: int) -> Sample:
    """The sample of ``tokens``, limited to its last ``size`` inputs."""
    return Sample(np.asarray(tokens[-(size + 1) :]), predicted)


class Scores(NamedTuple):
    """The scores of n samples."""

    nll: np.ndarray
    """Negative log-likelihood of all its predicted tokens, in nats: float64 [n]."""
    right: np.ndarray
    """Whether each of them was the most likely one: bool [n]."""


@dataclass(frozen=True)
class Request:
    """An evaluation file, and how to read it."""

    path: Path
    """A text file; for PPL also the prefix of a data set."""
    seq_length: int
    """Maximum number of input tokens."""
    stride: int
    """New tokens in each window of a longer text."""
    strict: bool = False
    """Whether LAMBADA predicts the whole last word, not its last token."""
    key: str = "text"
    """Key of the text in a JSONL file."""
    start: int = -1
    """Token that a decoder of its own reads first."""


class Task(NamedTuple):
    """Samples, and the metrics of their scores."""

    samples: Sequence[Sample]
    metrics: Callable[[Scores], Mapping[str, Metric]]


def make_task(name: str, request: Request, tokenizer: Tokenizer) -> Task:
    """The task ``name`` of ``TASKS`` on a file. Raises ConfigError for a file that is missing or unusable."""
    return TASKS[name](request, tokenizer)


def _lambada(request: Request, tokenizer: Tokenizer) -> Task:
    """LAMBADA: predict the last word, or the last token, of each passage."""
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
    return Task(samples, partial(_lambada_metrics, cut))


def _last_token(where: str, text: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    return _tokenize(where, text, tokenizer), 1


def _last_word(where: str, text: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """As in Megatron-LM: the text before the last word, stripped, and the word with a blank before it."""
    word = (text.split() or [""])[-1]
    before = _tokenize(where, text[: text.rfind(word)].strip(), tokenizer)
    target = _tokenize(where, f" {word}", tokenizer)
    return before + target, len(target)


def _lambada_metrics(cut: int, scores: Scores) -> dict[str, Metric]:
    right, count = int(scores.right.sum()), len(scores.right)
    return {
        "accuracy": right / count,
        "perplexity": _perplexity(_total(scores), count),
        "right": right,
        "passages": count,
        "passages_cut": cut,
    }


def _wikitext(request: Request, tokenizer: Tokenizer) -> Task:
    """WikiText: a whole file as one text, normalized by the number of its words."""
    text = read_text(request.path)
    tokens = np.array(_tokenize(str(request.path), detokenize_wikitext(text), tokenizer))
    return _text_task(request, tokens, {"word": count_words(text), "byte": len(text.encode())})


def _perplexity_of_any(request: Request, tokenizer: Tokenizer) -> Task:
    """Perplexity of a text, or of the concatenated texts of a JSONL or Parquet file, or documents of a data set."""
    path = request.path
    if not path.is_file():
        if path.with_name(f"{path.name}.idx").exists():
            return _text_task(request, read_tokens(path, tokenizer.vocab_size), {})
        raise ConfigError(f"{path}: no such file, nor {path.name}.bin and {path.name}.idx; name a text or a data set")
    if uncompressed(path).suffix in _MANY_TEXTS:
        lines = [line for line in read_lines(path, request.key) if line.text]
        ids = [id for line in lines for id in (*_tokenize(line.where, line.text, tokenizer), tokenizer.eod)]
        text = "\n".join(line.text for line in lines)
    else:
        text = read_text(path)
        ids = _tokenize(str(path), text, tokenizer)
    return _text_task(request, np.array(ids), {"word": len(text.split()), "byte": len(text.encode())})


def _pairs(request: Request, tokenizer: Tokenizer) -> Task:
    """Pairs of texts: the target of each input, with its end, by a model with an encoder."""
    samples, cut = [], 0
    for where, text, target in read_pairs(request.path):
        read, written = (_tokenize(where, part, tokenizer) for part in (text, target))
        cut += max(len(read), len(written)) >= request.seq_length
        read, written = (part[: request.seq_length - 1] for part in (read, written))
        tokens = np.array([request.start, *written, tokenizer.eod])
        samples.append(Sample(tokens, len(tokens) - 1, [*read, tokenizer.eod]))
    return Task(samples, partial(_pair_metrics, sum(sample.predicted for sample in samples), cut))


def _pair_metrics(tokens: int, cut: int, scores: Scores) -> dict[str, Metric]:
    nll, right = _total(scores), int(scores.right.sum())
    return {
        "loss": nll / tokens,
        "perplexity": _perplexity(nll, tokens),
        "accuracy": right / len(scores.right),
        "right": right,
        "pairs": len(scores.right),
        "pairs_cut": cut,
        "tokens": tokens,
    }


def _text_task(request: Request, tokens: np.ndarray, units: Mapping[str, int]) -> Task:
    windows = Windows(tokens, size=request.seq_length, stride=request.stride)
    if not len(windows):
        raise ConfigError(
            f"{request.path}: {counted(len(tokens), 'token')}, from which nothing can be predicted; give a longer text"
        )
    return Task(windows, partial(_text_metrics, windows, {unit: count for unit, count in units.items() if count}))


def _text_metrics(windows: Windows, units: Mapping[str, int], scores: Scores) -> dict[str, Metric]:
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
    "PAIRS": _pairs,
}


def _tokenize(where: str, text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        with data_errors_as_usage():
            return tokenizer.tokenize(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _total(scores: Scores) -> float:
    """Loss of all samples, in nats, independent of their order. Raises NumericsError if it is not finite."""
    nll = math.fsum(scores.nll)
    if not math.isfinite(nll):
        bad = int(np.argmin(np.isfinite(scores.nll)))
        raise NumericsError(f"sample {bad} has the loss {scores.nll[bad]}: check the weights and the precision")
    return nll


def _perplexity(nll: float, count: int) -> float | None:
    """exp(nll / count); None on overflow."""
    try:
        return math.exp(nll / count)
    except OverflowError:
        return None
