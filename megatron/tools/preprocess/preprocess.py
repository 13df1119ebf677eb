"""From text to indexed data sets: read in chunks, tokenize in parallel, write in order.

Memory stays flat: only a few chunks are in memory at any time. Regularly all output is flushed to disk, and a journal
records the progress.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config.errors import ConfigError, DataError, ResourceError
from megatron.launch.processes import exit_with_parent
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.base import check_words
from megatron.tools.preprocess.conversations import (
    Part,
    chat_template,
    check_encodable,
    document_parts,
    tokenize_documents,
)
from megatron.tools.preprocess.corpus import FORMATS, Chunk, json_object, line_texts, read_chunks
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder, best_dtype
from megatron.tools.preprocess.job import LOSS_MASK, TOKENS, Job, Journal, Milestone, Summary

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
    """``text`` cut after each sentence and the white space that follows it; some pieces are white space alone."""
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


MILESTONE_CHUNKS = 32
"""Chunks between two milestones, from which an interrupted job resumes."""


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


def preprocess(
    job: Job, report: Callable[[Summary], None], log_skipped: Callable[[str], None], *, resume: bool = False
) -> Summary:
    """Write one data set for each key; all of them, or none.

    Args:
        report: called with the summary so far, after each chunk and at the end.
        log_skipped: called with the error of each line that is skipped.
        resume: continue where the same job was interrupted, if it was.

    Raises:
        DataError: a file or line that cannot be read (unless lines are to be skipped), a bad vocabulary or one
            without any of the words, no document at all, or unfinished output of another job.
        ConfigError: a package to read an input is missing, or the tokenizer has no token to begin documents with.
        ResourceError: the output cannot be written, or a worker was killed.
    """
    tokenizer = _tokenizer(job.tokenizer_type, job.vocab_file, job.merge_file, job.eod_token)
    if job.prepend_bos and tokenizer.bos is None:
        raise ConfigError(f"--prepend-bos: {job.tokenizer_type} {job.vocab_file} has no bos_token: remove the flag")
    if job.chat_template is not None:
        chat_template(job.chat_template, tokenizer)  # an error in it is reported before any work
    dtype = best_dtype(tokenizer.vocab_size)
    journal = job.journal
    done = journal.read() if resume else None
    summary = Summary(**done.counts) if done else Summary()
    summary.resumed_at = summary.documents
    try:
        Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            builders = {
                key: stack.enter_context(
                    IndexedDatasetBuilder(
                        prefix, np.uint8 if key == LOSS_MASK else dtype, done.outputs[key] if done else None
                    )
                )
                for key, prefix in job.prefixes.items()
            }
            if done is None:
                journal.remove()
            results = _in_order(partial(tokenize_chunk, job), _chunks(job, done), job.workers)
            for number, tokenized in enumerate(stack.enter_context(closing(results)), start=1):
                _handle_errors(tokenized, summary, log_skipped if job.skip_errors else None)
                _add(builders, tokenized, summary)
                report(summary)
                if number % MILESTONE_CHUNKS == 0:
                    _set_milestone(journal, builders, tokenized.position, summary)
            if not summary.documents:
                raise DataError(f"no document in {', '.join(map(str, job.inputs))}: nothing to write")
            _check_vocabulary(job, summary)
            for builder in builders.values():
                builder.finish()
        journal.remove()
    except BrokenProcessPool as error:
        cause = "a worker was killed, maybe out of memory: use fewer --workers"
        raise ResourceError(f"{cause}{_hint(journal)}") from error
    except OSError as error:
        place = error.filename or job.output_prefix
        raise ResourceError(f"cannot write {place}: {error.strerror}{_hint(journal)}") from error
    summary.output_bytes = summary.tokens * dtype.itemsize
    summary.finished = True
    report(summary)
    return summary


def tokenize_chunk(job: Job, chunk: Chunk) -> Tokenized:
    """Read and tokenize the lines of a chunk; runs in a worker."""
    if job.conversations is not None:
        return _tokenize_conversations(job, chunk)
    kind = FORMATS[job.format_of(chunk.path)]
    texts: dict[str, list[str]] = {key: [] for key in job.json_keys}
    numbers: list[int] = []
    errors: list[LineError] = []
    for number, line in enumerate(chunk.lines, chunk.first_line):
        try:
            texts_of_line = line_texts(chunk.path, job.input_format, number, line, job.json_keys)
            _check_words(f"{chunk.path}:{number}", texts_of_line)
        except DataError as error:
            errors.append(LineError(number, str(error), is_empty=False))
            continue
        numbers.append(number)
        for key, text in zip(job.json_keys, texts_of_line, strict=True):
            texts[key].append(text)
    tokenizer = _tokenizer(job.tokenizer_type, job.vocab_file, job.merge_file, job.eod_token)
    begin = [tokenizer.bos] if job.prepend_bos and tokenizer.bos is not None else []
    end = [tokenizer.eod] if job.append_eod else []
    tokens, sizes = {}, {}
    split = partial(split_sentences, keep_newlines=job.keep_newlines) if job.split_sentences else _whole
    blank = unknown = 0
    for key in job.json_keys:
        tokenized = _tokenized(tokenizer, [split(text) for text in texts[key]])
        without = [number for number, document in zip(numbers, tokenized, strict=True) if not document]
        if kind.allows_blank_lines:
            blank += len(without)
        else:
            errors += [
                LineError(line, f'{chunk.path}:{line}: no text under "{key}"', is_empty=True) for line in without
            ]
        documents = [[*document[:-1], document[-1] + end] for document in tokenized if document]
        if begin:
            documents = [[begin + document[0], *document[1:]] for document in documents]
        ids = chain.from_iterable(chain.from_iterable(documents))
        tokens[key] = np.fromiter(ids, best_dtype(tokenizer.vocab_size))
        unknown += 0 if tokenizer.unk is None else int(np.count_nonzero(tokens[key] == tokenizer.unk))
        sizes[key] = [[len(ids) for ids in document] for document in documents]
    return Tokenized(tokens, sizes, blank, unknown, sorted(errors), chunk.size, chunk.position)


def _tokenize_conversations(job: Job, chunk: Chunk) -> Tokenized:
    """The same for documents with a loss mask."""
    assert job.conversations is not None
    tokenizer = _tokenizer(job.tokenizer_type, job.vocab_file, job.merge_file, job.eod_token)
    template = chat_template(job.chat_template, tokenizer) if job.chat_template is not None else None
    documents: list[list[Part]] = []
    numbers: list[int] = []
    errors: list[LineError] = []
    for number, line in enumerate(chunk.lines, chunk.first_line):
        where = f"{chunk.path}:{number}"
        try:
            assert isinstance(line, bytes), "a rule refuses Parquet"
            document = json_object(where, line)
            parts = [] if document is None else document_parts(where, document, job.conversations, template)
            check_encodable(where, parts)
            _check_words(where, [part.text for part in parts])
        except DataError as error:
            errors.append(LineError(number, str(error), is_empty=False))
            continue
        documents.append(parts)
        numbers.append(number)
    tokens: list[int] = []
    masks: list[int] = []
    sizes: list[list[int]] = []
    for number, (ids, mask) in zip(
        numbers, tokenize_documents(tokenizer, documents, append_eod=job.append_eod), strict=True
    ):
        if not any(mask):
            errors.append(LineError(number, f"{chunk.path}:{number}: no token to train on", is_empty=True))
            continue
        tokens += ids
        masks += mask
        sizes.append([len(ids)])
    arrays = {TOKENS: np.array(tokens, best_dtype(tokenizer.vocab_size)), LOSS_MASK: np.array(masks, np.uint8)}
    unknown = 0 if tokenizer.unk is None else int(np.count_nonzero(arrays[TOKENS] == tokenizer.unk))
    return Tokenized(arrays, dict.fromkeys(arrays, sizes), 0, unknown, sorted(errors), chunk.size, chunk.position)


def _check_words(where: str, texts: Sequence[str]) -> None:
    """Raises DataError beginning with ``where`` for a word that is too long."""
    try:
        for text in texts:
            check_words(text)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _whole(text: str) -> list[str]:
    """The one sequence of a document that is not split."""
    return [text]


def _tokenized(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """The tokens of each sequence of each document, without those that have none."""
    ids = iter(tokenizer.tokenize_batch(list(chain.from_iterable(documents))))
    return [[tokens for tokens in islice(ids, len(sequences)) if tokens] for sequences in documents]


@cache
def _tokenizer(kind: str, vocab_file: str | None, merge_file: str | None, eod_token: str | None) -> Tokenizer:
    """The tokenizer, built once in a process and inherited by forked workers."""
    return build_tokenizer(kind, vocab_file, merge_file, eod_token=eod_token)


def _chunks(job: Job, done: Milestone | None) -> Iterator[Chunk]:
    """The inputs in chunks, without those that are done."""
    inputs, chunks = done.position if done else (0, 0)
    for number, path in enumerate(job.inputs[inputs:], inputs):
        cut = read_chunks(path, job.format_of(path), job.json_keys, size=job.chunk_bytes)
        for count, chunk in islice(enumerate(cut, start=1), chunks, None):
            yield chunk._replace(position=(number, count))
        chunks = 0


def _in_order(
    function: Callable[[Chunk], Tokenized], chunks: Iterable[Chunk], workers: int
) -> Generator[Tokenized, None, None]:
    """Map ``function`` over ``chunks`` with some processes; at most two chunks per process are in flight."""
    if workers == 1:
        yield from map(function, chunks)
        return
    with ProcessPoolExecutor(workers, initializer=exit_with_parent, initargs=(os.getpid(),)) as pool:
        pending: deque[Future[Tokenized]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(function, chunk))
                if len(pending) == 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _handle_errors(tokenized: Tokenized, summary: Summary, log_skipped: Callable[[str], None] | None) -> None:
    """Count and log a chunk's bad lines; without ``log_skipped``, raise DataError for the first."""
    for error in tokenized.errors:
        if log_skipped is None:
            raise DataError(f"{error.message} (--on-error skip skips such lines)")
        log_skipped(error.message)
        summary.empty += error.is_empty
        summary.bad_lines += not error.is_empty
    summary.blank += tokenized.blank


def _add(builders: Mapping[str, IndexedDatasetBuilder], tokenized: Tokenized, summary: Summary) -> None:
    """Write a chunk's documents and count them."""
    for key, builder in builders.items():
        builder.add_documents(tokenized.tokens[key], tokenized.sizes[key])
        if key == LOSS_MASK:
            summary.counted += int(tokenized.tokens[key].sum(dtype=np.int64))
            continue
        summary.documents += len(tokenized.sizes[key])
        summary.tokens += len(tokenized.tokens[key])
    summary.unknown += tokenized.unknown
    summary.input_bytes += tokenized.text_bytes


def _check_vocabulary(job: Job, summary: Summary) -> None:
    """Raises DataError if no word of the text is in the vocabulary."""
    words = summary.tokens - (summary.documents if job.append_eod else 0)
    if summary.unknown == words:
        raise DataError(
            f"none of the {words:,} words of {', '.join(map(str, job.inputs))} is in --vocab-file {job.vocab_file}: "
            "give the vocabulary that was made for this text (tools/train_tokenizer.py makes one)"
        )


def _set_milestone(
    journal: Journal, builders: Mapping[str, IndexedDatasetBuilder], position: tuple[int, int], summary: Summary
) -> None:
    """Flush all output to disk, so that the job can resume after ``position``."""
    outputs = {key: builder.sync() for key, builder in builders.items()}
    journal.write(Milestone(position, outputs, vars(summary)))
    for builder in builders.values():
        builder.keeps = True


def _hint(journal: Journal) -> str:
    return "; --resume continues from there" if journal.path.exists() else ""
