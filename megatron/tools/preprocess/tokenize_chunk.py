"""The work of one preprocessing process: tokenize the documents of a chunk of text."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import numpy as np

from megatron.common.errors import DataError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.base import check_words
from megatron.tools.preprocess.conversations import (
    Part,
    chat_template,
    check_encodable,
    document_parts,
    tokenize_documents,
)
from megatron.tools.preprocess.corpus import FORMATS, Chunk, Line, json_object, line_texts
from megatron.tools.preprocess.indexed_dataset_builder import best_dtype
from megatron.tools.preprocess.job import LOSS_MASK, TOKENS, Job


class LineError(NamedTuple):
    """An error in a line."""

    line: int
    message: str
    is_empty: bool
    """Whether the line only has no text."""


class Tokenized(NamedTuple):
    """A chunk's documents."""

    tokens: dict[str, np.ndarray]
    """For each key: all tokens, documents concatenated."""
    sizes: dict[str, list[list[int]]]
    """For each key: number of tokens of each sequence of each document."""
    blank: int
    unknown: int
    """Tokens of words that are not in the vocabulary."""
    errors: list[LineError]
    text_bytes: int
    position: tuple[int, int]
    """That of the chunk."""


def tokenize_chunk(job: Job, chunk: Chunk) -> Tokenized:
    """Read and tokenize the lines of a chunk; runs in a worker."""
    return _tokenize_texts(job, chunk) if job.conversations is None else _tokenize_conversations(job, chunk)


def _tokenize_texts(job: Job, chunk: Chunk) -> Tokenized:
    """A document for each text of a line, under its key."""
    tokenizer, kind = tokenizer_of(job), FORMATS[job.format_of(chunk.path)]

    def read(where: str, number: int, line: Line) -> list[str]:
        texts = line_texts(chunk.path, job.input_format, number, line, job.json_keys)
        _check_words(where, texts)
        return texts

    lines, errors = _read_lines(chunk, read)
    dtype = best_dtype(tokenizer.vocab_size)
    begin = [np.array([tokenizer.bos], dtype)] if job.prepend_bos and tokenizer.bos is not None else []
    end = [np.array([tokenizer.eod], dtype)] if job.append_eod else []
    tokens, sizes = {}, {}
    split = partial(split_sentences, keep_newlines=job.keep_newlines) if job.split_sentences else _unsplit
    blank = unknown = 0
    for column, key in enumerate(job.json_keys):
        tokenized = _tokenized(tokenizer, [split(texts[column]) for _, texts in lines])
        without = [number for (number, _), document in zip(lines, tokenized, strict=True) if not document]
        if kind.allows_blank_lines:
            blank += len(without)
        else:
            errors += [
                LineError(line, f'{chunk.path}:{line}: no text under "{key}"', is_empty=True) for line in without
            ]
        documents = [document for document in tokenized if document]
        pieces = chain.from_iterable([*begin, *document, *end] for document in documents)
        tokens[key] = np.concatenate([np.empty(0, dtype), *pieces], dtype=dtype, casting="unsafe")
        unknown += _unknown(tokenizer, tokens[key])
        sizes[key] = [[len(ids) for ids in document] for document in documents]
        for of_document in sizes[key]:
            of_document[0] += len(begin)
            of_document[-1] += len(end)
    return Tokenized(tokens, sizes, blank, unknown, sorted(errors), chunk.size, chunk.position)


def _tokenize_conversations(job: Job, chunk: Chunk) -> Tokenized:
    """A document with a loss mask for each line."""
    assert job.conversations is not None
    kind, tokenizer = job.conversations, tokenizer_of(job)
    template = chat_template(job.chat_template, tokenizer) if job.chat_template is not None else None

    def read(where: str, number: int, line: Line) -> list[Part]:
        assert isinstance(line, bytes), "a rule rejects Parquet"
        document = json_object(where, line)
        parts = [] if document is None else document_parts(where, document, kind, template)
        check_encodable(where, parts)
        _check_words(where, [part.text for part in parts])
        return parts

    lines, errors = _read_lines(chunk, read)
    documents = tokenize_documents(tokenizer, [parts for _, parts in lines], append_eod=job.append_eod)
    tokens: list[int] = []
    masks: list[int] = []
    sizes: list[list[int]] = []
    for (number, _), (ids, mask) in zip(lines, documents, strict=True):
        if not any(mask):
            errors.append(LineError(number, f"{chunk.path}:{number}: no token to train on", is_empty=True))
            continue
        tokens += ids
        masks += mask
        sizes.append([len(ids)])
    arrays = {TOKENS: np.array(tokens, best_dtype(tokenizer.vocab_size)), LOSS_MASK: np.array(masks, np.uint8)}
    unknown = _unknown(tokenizer, arrays[TOKENS])
    return Tokenized(arrays, dict.fromkeys(arrays, sizes), 0, unknown, sorted(errors), chunk.size, chunk.position)


_T = TypeVar("_T")


def _read_lines(chunk: Chunk, read: Callable[[str, int, Line], _T]) -> tuple[list[tuple[int, _T]], list[LineError]]:
    """What ``read`` returns for each line, given its location, number and content; and its errors."""
    lines: list[tuple[int, _T]] = []
    errors: list[LineError] = []
    for number, line in enumerate(chunk.lines, chunk.first_line):
        try:
            lines.append((number, read(f"{chunk.path}:{number}", number, line)))
        except DataError as error:
            errors.append(LineError(number, str(error), is_empty=False))
    return lines, errors


def _check_words(where: str, texts: Sequence[str]) -> None:
    """Raises DataError beginning with ``where`` for a word that is too long."""
    try:
        for text in texts:
            check_words(text)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _unsplit(text: str) -> list[str]:
    """The one sequence of a document that is not split."""
    return [text]


def _tokenized(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> list[list[np.ndarray]]:
    """The tokens of each sequence of each document, [tokens], without empty sequences."""
    ids = iter(tokenizer.tokenize_arrays(list(chain.from_iterable(documents))))
    return [[tokens for tokens in islice(ids, len(sequences)) if len(tokens)] for sequences in documents]


def _unknown(tokenizer: Tokenizer, tokens: np.ndarray) -> int:
    """Tokens of words that are not in the vocabulary."""
    return 0 if tokenizer.unk is None else int(np.count_nonzero(tokens == tokenizer.unk))


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer, built once in a process and inherited by forked workers."""
    return _build_once(job.tokenizer_type, job.vocab_file, job.merge_file, job.eod_token)


@cache
def _build_once(kind: str, vocab_file: str | None, merge_file: str | None, eod_token: str | None) -> Tokenizer:
    return build_tokenizer(kind, vocab_file, merge_file, eod_token=eod_token)


ABBREVIATIONS = frozenset(
    "adj adm adv al approx assn ave bldg bros brig ca capt cf ch chap cmdr co col comdr corp cpl dept dist dr ed eds "
    "e.g eg eq esp est et ext fig figs fn fr ft gen gov hon hr i.e ie inc incl inst jr lt ltd maj messrs mgr "
    "mr mrs ms mt mts mx orig p pp ph.d phd prof pvt rep rev resp sen sgt sr st supt trans "
    "univ v viz vol vols vs".split()
)
"""Words before a stop that does not end a sentence, in lower case and without their last stop."""

_BLANK_LINES = re.compile(r"(\n\s*\n)")
_END = re.compile(
    r"""(?<![.!?\u2026])[.!?\u2026]+["'\u2019\u201d\u00bb)\]]*\s+(?=["'\u2018\u201c\u00ab(\[]*[^\W_a-z]|["'\u2018\u201c\u00ab(\[]*[^\w\s])"""
    r"""|[\u3002\uff01\uff1f]+["'\u2019\u201d\u300d\u300f)\]]*\s*"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'\u2018\u201c]+$")


_LONGER_THAN_ABBREVIATIONS = 64
"""Characters."""


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """The sentences of ``text`` in order; together they are all of its words.

    White space around a sentence is removed, or kept at its end with ``keep_newlines``: then they are all of the text.
    """
    if not text.strip():
        return []
    sentences = [""]
    for piece in _pieces(text):
        if piece.strip() and sentences[-1].strip():
            sentences.append(piece)
        else:
            sentences[-1] += piece
    return sentences if keep_newlines else [sentence.strip() for sentence in sentences]


def _pieces(text: str) -> Iterator[str]:
    """``text`` cut after each sentence and the white space that follows it; some pieces are only white space."""
    paragraphs, blank_lines = (parts := _BLANK_LINES.split(text))[::2], [*parts[1::2], ""]
    for paragraph, blank in zip(paragraphs, blank_lines, strict=True):
        start = 0
        for end in _END.finditer(paragraph):
            if not _is_abbreviation(paragraph[start : end.start()], end.group()):
                yield paragraph[start : end.end()]
                start = end.end()
        yield paragraph[start:] + blank


def _is_abbreviation(before: str, mark: str) -> bool:
    """Whether a single stop belongs to the word before it."""
    if mark.rstrip() != ".":
        return False
    found = _LAST_WORD.search(before[-_LONGER_THAN_ABBREVIATIONS:])
    word = found.group() if found else ""
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")
