"""Evaluation tasks: read samples from a file, and compute metrics from their scores. No torch here."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.common.errors import DataError, NumericsError, counted
from megatron.common.reading import is_present, read_bytes
from megatron.data.fingerprint import other_tokenizers
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.tokens import tokenize_continuation
from megatron.tools.preprocess.corpus import FORMATS, read_chunks
from megatron.tools.preprocess.file_lines import uncompressed

Metric = int | float | None
_MANY_TEXTS = (".jsonl", ".json", ".parquet")
"""Suffixes of files with a text per record."""
_PAIR = ("input", "target")
"""Keys of the input and target texts of a pair."""
_CHUNK = 1 << 20


class Sample(NamedTuple):
    """Consecutive tokens, the last of which are predicted, each from all previous ones."""

    tokens: np.ndarray
    """Integers [n + 1]; the first n are the input."""
    predicted: int
    """Number of predicted tokens, from 1 to n."""
    text: Sequence[int] = ()
    """Tokens of the encoder's input, for an encoder-decoder model."""
    images: np.ndarray | None = None
    """Images whose placeholders are among the tokens, for a vision-language model: uint8 [i, size, size, 3]."""


def windows(tokens: np.ndarray, *, size: int, stride: int) -> list[Sample]:
    """Sliding windows of ``size`` inputs over a long text, each ``stride`` tokens after the previous one.

    Every token but the first is predicted exactly once: the first window predicts all of its tokens, later windows
    only their ``stride`` new tokens, with at least ``size - stride`` tokens of context.
    """
    samples: list[Sample] = []
    seen = 0
    last = len(tokens) - 1
    while seen < last:
        begin = max(seen + stride - size, 0) if samples else 0
        end = min(begin + size, last)
        samples.append(Sample(tokens[begin : end + 1], end - seen))
        seen = end
    return samples


def last_inputs(tokens: Sequence[int], predicted: int, size: int) -> Sample:
    """A sample of ``tokens``, truncated to the last ``size`` inputs."""
    return Sample(np.asarray(tokens[-(size + 1) :]), predicted)


class Scores(NamedTuple):
    """The scores of n samples."""

    nll: np.ndarray
    """Negative log-likelihood of all predicted tokens of each sample, in nats: float64 [n]."""
    right: np.ndarray
    """Whether all predicted tokens of a sample were the most likely ones: bool [n]."""


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
    """Whether LAMBADA predicts the full last word, not only its last token."""
    key: str = "text"
    """Key of the text in a JSONL file."""
    start: int = -1
    """First token of the decoder's input, for an encoder-decoder model."""
    override: bool = False
    """Whether a data set that was made with another tokenizer is accepted."""


class Task(NamedTuple):
    """Samples, and a function from their scores to metrics."""

    samples: Sequence[Sample]
    metrics: Callable[[Scores], Mapping[str, Metric]]


def make_task(name: str, request: Request, tokenizer: Tokenizer) -> Task:
    """Make the task ``name`` of ``TASKS`` from a file. Raises DataError if the file is missing or unusable."""
    return TASKS[name](request, tokenizer)


def _lambada(request: Request, tokenizer: Tokenizer) -> Task:
    """LAMBADA: predict the last word, or the last token, of each passage."""
    samples, cut = [], 0
    for where, (text,) in _read_rows(request.path, request.key):
        if request.strict:  # as in Megatron-LM: the text before the last word, stripped, and the word after a blank
            word = (text.split() or [""])[-1]
            target = _tokenize(where, f" {word}", tokenizer, tokenize_continuation)
            tokens = _prompt(where, text[: text.rfind(word)].strip(), tokenizer) + target
            predicted = len(target)
        else:
            tokens, predicted = _prompt(where, text, tokenizer), 1
        if not 0 < predicted < len(tokens) or predicted > request.seq_length:
            raise DataError(
                f"{where}: {len(tokens) - predicted} tokens and {predicted} to predict from them; give a passage of "
                f"two words or more, the last of them of at most {request.seq_length} tokens"
            )
        samples.append(last_inputs(tokens, predicted, request.seq_length))
        cut += len(tokens) - 1 > request.seq_length
    return Task(samples, partial(_lambada_metrics, cut))


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
    """WikiText: perplexity of a file as one text, normalized by its number of words."""
    text = _read_text(request.path)
    tokens = np.array(_prompt(str(request.path), detokenize_wikitext(text), tokenizer))
    return _text_task(request, tokens, {"word": count_words(text), "byte": len(text.encode())})


def _perplexity_task(request: Request, tokenizer: Tokenizer) -> Task:
    """Perplexity of a text, of the concatenated texts of a JSONL or Parquet file, or of an indexed data set."""
    path = request.path
    if not path.is_file() and is_present(f"{path}.idx"):
        if not request.override and (others := other_tokenizers([str(path)], tokenizer)):
            raise DataError(others)
        return _text_task(request, _tokens_of_data_set(path, tokenizer.vocab_size), {})
    if not is_present(path):
        raise DataError(f"{path}: no such file, nor {path.name}.bin and {path.name}.idx; name a text or a data set")
    if uncompressed(path).suffix in _MANY_TEXTS:
        lines = [(where, text) for where, (text,) in _read_rows(path, request.key) if text]
        ids = [*tokenizer.opening]
        ids += [id for where, text in lines for id in (*_tokenize(where, text, tokenizer), tokenizer.eod)]
        texts = [text for _, text in lines]
    else:
        texts = [_read_text(path)]
        ids = _prompt(str(path), texts[0], tokenizer)
    counts = {"word": sum(len(text.split()) for text in texts), "byte": sum(len(text.encode()) for text in texts)}
    return _text_task(request, np.array(ids), counts)


def _pairs(request: Request, tokenizer: Tokenizer) -> Task:
    """Pairs of texts: an encoder-decoder model predicts the target of each input, with its end token."""
    samples, cut = [], 0
    for where, texts in _read_rows(request.path, *_PAIR):
        source, target = (_tokenize(where, text, tokenizer) for text in texts)
        cut += max(len(source), len(target)) >= request.seq_length
        source, target = (part[: request.seq_length - 1] for part in (source, target))
        tokens = np.array([request.start, *target, tokenizer.eod])
        samples.append(Sample(tokens, len(tokens) - 1, [*source, tokenizer.eod]))
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
    samples = windows(tokens, size=request.seq_length, stride=request.stride)
    if not samples:
        raise DataError(
            f"{request.path}: {counted(len(tokens), 'token')}, from which nothing can be predicted; give a longer text"
        )
    return Task(samples, partial(_text_metrics, len(tokens) - 1, {unit: n for unit, n in units.items() if n}))


def _text_metrics(tokens: int, units: Mapping[str, int], scores: Scores) -> dict[str, Metric]:
    nll = _total(scores)
    return {
        "loss": nll / tokens,
        "perplexity": _perplexity(nll, tokens),
        **{f"{unit}_perplexity": _perplexity(nll, count) for unit, count in units.items()},
        "tokens": tokens,
        **{f"{unit}s": count for unit, count in units.items()},
        "windows": len(scores.nll),
    }


TASKS: dict[str, Callable[[Request, Tokenizer], Task]] = {
    "LAMBADA": _lambada,
    "WIKITEXT": _wikitext,
    "PPL": _perplexity_task,
    "PAIRS": _pairs,
}


def _read_text(path: Path) -> str:
    """The content of a UTF-8 file, with its line endings."""
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a file of text") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; name a file of text") from None


def _read_rows(path: Path, *keys: str) -> list[tuple[str, list[str]]]:
    """(location, texts of ``keys``) of each row of a Parquet file or non-blank line of a JSONL file."""
    kind = "parquet" if uncompressed(path).suffix == ".parquet" else "jsonl"
    rows = [
        (where, FORMATS[kind].texts(where, line, keys))
        for chunk in read_chunks(path, kind, keys, size=_CHUNK)
        for number, line in enumerate(chunk.lines, chunk.first_line)
        if not isinstance(line, bytes) or line.strip()
        for where in [f"{path}:{number}"]
    ]
    if not rows:
        raise DataError(f"{path}: no text in it; give a JSON object with {' and '.join(map(repr, keys))} on each line")
    return rows


def _tokens_of_data_set(prefix: Path, vocab_size: int) -> np.ndarray:
    """All tokens of the data set ``PREFIX.bin`` and ``PREFIX.idx``, concatenated, as a memory map: integers [n]."""
    dataset = IndexedDataset(prefix)
    tokens = dataset.span(0, dataset.num_tokens)
    if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size):
        raise DataError(
            f"{prefix}.bin: its tokens range from {int(tokens.min())} to {int(tokens.max())}, and the model's "
            f"vocabulary has {vocab_size}; give the data set that was made with the model's tokenizer"
        )
    return tokens


def _tokenize(
    where: str,
    text: str,
    tokenizer: Tokenizer,
    tokenize: Callable[[Tokenizer, str], list[int]] = Tokenizer.tokenize,
) -> list[int]:
    try:
        return tokenize(tokenizer, text)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _prompt(where: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text after those with which texts of the model begin."""
    return [*tokenizer.opening, *_tokenize(where, text, tokenizer)]


def _total(scores: Scores) -> float:
    """Sum of the losses of all samples, in nats, independent of their order. Raises NumericsError if not finite."""
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
"""Brackets and quotes, inside which leading and trailing blanks are removed."""
_REST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="),
    (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def detokenize_wikitext(text: str) -> str:
    """``text`` without the blanks that WikiText inserts around punctuation."""
    for old, new in _SPACED:
        text = text.replace(old, new)
    for opening, closing in _ENCLOSED:
        # Without what follows the last end, where each beginning would be searched to the end of the text.
        enclosed, end, rest = text.rpartition(closing)
        pattern = f"({re.escape(opening)})([^{re.escape(closing)}]*)({re.escape(closing)})"
        text = re.sub(pattern, lambda found: found[1] + found[2].strip() + found[3], enclosed + end) + rest
    for old, new in _REST:
        text = text.replace(old, new)
    return text


def count_words(text: str) -> int:
    """Number of words of a tokenized WikiText text, for its perplexity: it is split at blanks, not at line ends."""
    return len(text.strip().split(" "))
