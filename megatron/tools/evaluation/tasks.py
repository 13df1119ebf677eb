"""Evaluation tasks: reading their data, the samples of a file, and the metrics computed from scores. No torch here."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config.errors import ConfigError, DataError, NumericsError, counted
from megatron.config.reading import read_bytes
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import Tokenizer
from megatron.tools.preprocess.corpus import FORMATS, format_of, read_chunks, uncompressed

_CHUNK = 1 << 20


class Line(NamedTuple):
    """One text of a file, with its location for messages."""

    where: str
    text: str


def read_text(path: Path) -> str:
    """The content of a UTF-8 file, line ends unchanged. Raises ConfigError if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a file of text") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; name a file of text") from None


def read_lines(path: Path, key: str) -> list[Line]:
    """The text under ``key`` of each line of a JSONL file, or row of Parquet, without blank lines.

    Raises ConfigError if the file cannot be read, a line is invalid, or there is no text.
    """
    kind = "parquet" if format_of(path) == "parquet" else "jsonl"
    with data_errors_as_usage():
        lines = [
            Line(where, text)
            for chunk in read_chunks(path, kind, (key,), size=_CHUNK)
            for number, line in enumerate(chunk.lines, chunk.first_line)
            if not isinstance(line, bytes) or line.strip()
            for where in [f"{path}:{number}"]
            for text in FORMATS[kind].texts(where, line, (key,))
        ]
    if not lines:
        raise ConfigError(f"{path}: no text in it; give a JSON object with {key!r} on each line")
    return lines


PAIR = ("input", "target")
"""Keys of a text and of what is to be written for it."""


def read_pairs(path: Path) -> list[tuple[str, str, str]]:
    """Location, input and target of each line of JSONL, or row of Parquet. Raises ConfigError as ``read_lines``."""
    kind = "parquet" if format_of(path) == "parquet" else "jsonl"
    with data_errors_as_usage():
        pairs = [
            (where, text, target)
            for chunk in read_chunks(path, kind, PAIR, size=_CHUNK)
            for number, line in enumerate(chunk.lines, chunk.first_line)
            if not isinstance(line, bytes) or line.strip()
            for where in [f"{path}:{number}"]
            for text, target in [FORMATS[kind].texts(where, line, PAIR)]
        ]
    if not pairs:
        raise ConfigError(f"{path}: no pair in it; give a JSON object with input and target on each line")
    return pairs


def read_tokens(prefix: Path, vocab_size: int) -> np.ndarray:
    """All tokens of the data set ``PREFIX.bin`` and ``PREFIX.idx`` in a row, by memory map: integers [n].

    Raises ConfigError if it is missing or broken, or holds tokens outside a vocabulary of ``vocab_size``.
    """
    with data_errors_as_usage():
        dataset = IndexedDataset(prefix)
    tokens = dataset.span(0, dataset.num_tokens)
    if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size):
        raise ConfigError(
            f"{prefix}.bin: its tokens range from {int(tokens.min())} to {int(tokens.max())}, and the model's "
            f"vocabulary has {vocab_size}; give the data set that was made with the model's tokenizer"
        )
    return tokens


@contextmanager
def data_errors_as_usage() -> Iterator[None]:
    """Turn DataError into ConfigError: a broken file on the command line is wrong usage."""
    try:
        yield
    except DataError as error:
        raise ConfigError(error.messages) from error


_SPACED = (
    ("s '", "s'"),
    # inside words and numbers
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    # after a word
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_ENCLOSED = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
"""Pairs whose inner blanks are removed."""
_REST = (
    # headings
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """``text`` without the blanks that WikiText inserts."""
    for old, new in _SPACED:
        text = text.replace(old, new)
    for opening, closing in _ENCLOSED:
        inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(f"{re.escape(opening)}{inside}{re.escape(closing)}", rf"{opening}\1{closing}", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text


def count_words(text: str) -> int:
    """Words of WikiText's tokenized text, which normalize perplexity: split at blanks only, so line ends count."""
    return len(text.strip().split(" "))


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


Metric = int | float | None
_MANY_TEXTS = (".jsonl", ".json", ".parquet")
"""Endings of files that hold many texts."""


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


class Scores(NamedTuple):
    """The scores of n samples."""

    nll: np.ndarray
    """Negative log-likelihood of all its predicted tokens, in nats: float64 [n]."""
    right: np.ndarray
    """Whether each of them was the most likely one: bool [n]."""


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
