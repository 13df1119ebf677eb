"""From text to indexed data sets: read in chunks, tokenize in parallel, write in order.

Memory stays flat: a few chunks are under way at any time, and only sizes are kept of what is written.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.data.corpus import Chunk, input_format, read_chunks, read_texts
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder, best_dtype
from megatron.data.sentences import split_sentences
from megatron.data.workers import leave_with_parent
from megatron.errors import DataError, ResourceError
from megatron.tokenizer import Tokenizer, build_tokenizer

CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to make of which files."""

    inputs: tuple[Path, ...]
    output_prefix: str
    input_format: str | None = None
    """jsonl or text; None goes by each file's name."""
    json_keys: tuple[str, ...] = ("text",)
    tokenizer_type: str = "GPT2BPETokenizer"
    vocab_file: str | None = None
    merge_file: str | None = None
    append_eod: bool = False
    workers: int = 1
    split_sentences: bool = False
    """Whether each sentence of a document is a sequence of its own, as BERT's samples need it."""
    skip_errors: bool = False

    @property
    def prefixes(self) -> dict[str, str]:
        """The prefix of each key's data set."""
        kind = "sentence" if self.split_sentences else "document"
        return {key: f"{self.output_prefix}_{key}_{kind}" for key in self.json_keys}


@dataclass
class Summary:
    """What was read and written."""

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    """Bytes of tokens."""
    empty: int = 0
    bad_lines: int = 0
    first_fault: str = ""
    finished: bool = False


class Tokenized(NamedTuple):
    """A chunk's documents."""

    tokens: dict[str, np.ndarray]
    """Of each key: all tokens, one document behind the other."""
    sizes: dict[str, list[list[int]]]
    """Of each key: tokens of each sequence of each document."""
    empty: int
    faults: list[str]
    input_bytes: int


def preprocess(job: Job, report: Callable[[Summary], None]) -> Summary:
    """Write one data set for each key; all of them, or none.

    Args:
        report: called with the summary so far, after each chunk and at the end.

    Raises:
        DataError: a file or line that cannot be read (unless lines are to be skipped), a bad
            vocabulary, or no document at all.
        ResourceError: no room for the output, or a worker that was killed.
    """
    tokenizer = _tokenizer(job.tokenizer_type, job.vocab_file, job.merge_file)
    dtype = best_dtype(tokenizer.vocab_size)
    summary = Summary()
    try:
        Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            builders = {
                key: stack.enter_context(IndexedDatasetBuilder(prefix, dtype)) for key, prefix in job.prefixes.items()
            }
            chunks = stack.enter_context(closing(_in_order(partial(tokenize_chunk, job), _chunks(job), job.workers)))
            for tokenized in chunks:
                _add(builders, tokenized, summary, skip_errors=job.skip_errors)
                report(summary)
            if not summary.documents:
                raise DataError(f"no document in {', '.join(map(str, job.inputs))}: nothing to write")
            for builder in builders.values():
                builder.finish()
    except BrokenProcessPool as error:
        raise ResourceError("a worker was killed, maybe for want of memory: use fewer --workers") from error
    except OSError as error:
        raise ResourceError(f"cannot write {error.filename or job.output_prefix}: {error.strerror}") from error
    summary.output_bytes = summary.tokens * dtype.itemsize
    summary.finished = True
    report(summary)
    return summary


def tokenize_chunk(job: Job, chunk: Chunk) -> Tokenized:
    """Read and tokenize the lines of a chunk; runs in a worker."""
    texts: dict[str, list[str]] = {key: [] for key in job.json_keys}
    faults = []
    empty = 0
    kind = job.input_format or input_format(chunk.path)
    for number, line in enumerate(chunk.lines, chunk.first_line):
        try:
            found = read_texts(f"{chunk.path}:{number}", line, kind, job.json_keys)
        except DataError as error:
            faults.append(str(error))
            continue
        empty += 0 if found else len(job.json_keys)
        for key, text in zip(job.json_keys, found, strict=False):
            texts[key].append(text)
    tokenizer = _tokenizer(job.tokenizer_type, job.vocab_file, job.merge_file)
    end = [tokenizer.eod] if job.append_eod else []
    tokens, sizes = {}, {}
    split = split_sentences if job.split_sentences else _whole
    for key in job.json_keys:
        documents = _tokenized(tokenizer, [split(text) for text in texts[key]])
        empty += len(texts[key]) - len(documents)
        for document in documents:
            document[-1] += end
        sizes[key] = [[len(ids) for ids in document] for document in documents]
        ids = chain.from_iterable(chain.from_iterable(documents))
        tokens[key] = np.fromiter(ids, best_dtype(tokenizer.vocab_size))
    return Tokenized(tokens, sizes, empty, faults, sum(map(len, chunk.lines)))


def _whole(text: str) -> list[str]:
    """The one sequence of a document that is not split."""
    return [text]


def _tokenized(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """The tokens of each sequence of each document, without those that have none."""
    ids = iter(tokenizer.tokenize_batch(list(chain.from_iterable(documents))))
    tokenized = ([tokens for tokens in islice(ids, len(sequences)) if tokens] for sequences in documents)
    return [sequences for sequences in tokenized if sequences]


@cache
def _tokenizer(kind: str, vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """The tokenizer, built once in a process, and inherited by the workers forked from it."""
    return build_tokenizer(kind, vocab_file, merge_file)


def _chunks(job: Job) -> Iterator[Chunk]:
    """All inputs, cut into chunks."""
    for path in job.inputs:
        yield from read_chunks(path, size=CHUNK_BYTES)


def _in_order(
    function: Callable[[Chunk], Tokenized], chunks: Iterable[Chunk], workers: int
) -> Generator[Tokenized, None, None]:
    """Map ``function`` over ``chunks`` with some processes; at most two chunks a process are under way."""
    if workers == 1:
        yield from map(function, chunks)
        return
    with ProcessPoolExecutor(workers, initializer=leave_with_parent) as pool:
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


def _add(
    builders: dict[str, IndexedDatasetBuilder], tokenized: Tokenized, summary: Summary, *, skip_errors: bool
) -> None:
    """Write a chunk's documents and count them. Raises DataError for its first bad line, unless to be skipped."""
    if tokenized.faults and not skip_errors:
        raise DataError(f"{tokenized.faults[0]} (--on-error skip leaves such lines out)")
    for key, builder in builders.items():
        start = 0
        for sequences in tokenized.sizes[key]:
            for size in sequences:
                builder.add_sequence(tokenized.tokens[key][start : start + size])
                start += size
            builder.end_document()
        summary.documents += len(tokenized.sizes[key])
        summary.tokens += start
    summary.input_bytes += tokenized.input_bytes
    summary.empty += tokenized.empty
    summary.bad_lines += len(tokenized.faults)
    summary.first_fault = summary.first_fault or "".join(tokenized.faults[:1])
