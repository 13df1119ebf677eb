"""Runs a preprocessing job: reads text in chunks, tokenizes them in parallel, and writes indexed data sets in order.

Only a few chunks are in memory at any time. At regular intervals all output is flushed to disk, and a journal records
the progress.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron.common.errors import ConfigError, DataError, ResourceError, limit_advice
from megatron.common.files import replace_file, signals_raised
from megatron.common.output_paths import file_problem
from megatron.common.processes import exit_with_parent
from megatron.data.fingerprint import chat_template_file, write_tokenizer
from megatron.data.image_dataset import image_writer
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.files import record_of
from megatron.tools.preprocess.corpus import Chunk, read_chunks
from megatron.tools.preprocess.image_conversations import read_image_chunks, tokenize_images
from megatron.tools.preprocess.job import LOSS_MASK, TOKENS, Job, Journal, Milestone, Summary
from megatron.tools.preprocess.tokenize_chunk import Tokenized, chat_template_of, tokenize_chunk, tokenizer_of
from megatron.tools.process_pool import started_pool

MILESTONE_CHUNKS = 32
"""Number of chunks between two milestones; an interrupted job resumes from the last one."""


def preprocess(
    job: Job, report: Callable[[Summary], None], log_skipped: Callable[[str], None], *, resume: bool = False
) -> Summary:
    """Tokenize all inputs into one data set for each key. After an error, no data set is written.

    Args:
        report: called with the summary so far, after each chunk and at the end.
        log_skipped: called with the error of each line that is skipped.
        resume: continue where the same job was interrupted, if it was.

    Raises:
        DataError: a file or, unless errors are skipped, a line cannot be read; the vocabulary is broken or has none of
            the words; there is no document; or there is unfinished output of another job.
        ConfigError: the package that reads an input is missing, the tokenizer has no beginning-of-sequence token, or
            the output cannot be written.
        ResourceError: the disk is full, or a worker cannot be started or was killed.
    """
    tokenizer, journal = tokenizer_of(job), job.journal
    if job.prepend_bos and tokenizer.bos is None:
        raise ConfigError(f"--prepend-bos: {job.tokenizer_type} {job.vocab_file} has no bos_token: remove the flag")
    chat_template_of(job)  # reports its errors before any work
    done = journal.read() if resume else None
    summary = done.summary if done else Summary()
    summary.resumed_at = summary.documents
    try:
        Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
        _write(job, tokenizer, done, summary, report, log_skipped)
        journal.remove()
    except BrokenProcessPool as error:
        cause = "a worker was killed or has crashed; if memory ran out, use fewer --workers"
        raise ResourceError(f"{cause}{_hint(journal)}") from error
    except OSError as error:
        place = error.filename or job.output_prefix
        problem = f"cannot write {place}: {error.strerror}{_hint(journal)}"
        if (advice := limit_advice(error)) is None:
            raise ConfigError(f"{problem}; name another --output-prefix") from error
        raise ResourceError(f"{problem}; {advice}") from error
    summary.output_bytes = summary.tokens * job.dtype_of(TOKENS, tokenizer.vocab_size).itemsize
    summary.finished = True
    report(summary)
    return summary


def check_output(job: Job) -> None:
    """Raises ConfigError if the output cannot be written, or would replace an input file."""
    prefix = job.output_prefix
    names = [name + ending for name in job.prefixes.values() for ending in (".bin", ".idx", ".tokenizer.json")]
    for name in (*names, *(f"{name}.partial" for name in names), f"{prefix}.progress"):
        if problem := file_problem("--output-prefix", name):
            raise ConfigError(problem)
    written = [path for name in (*names, f"{prefix}.progress") if (path := Path(name)).is_file()]
    for read in map(str, filter(None, (*job.inputs, job.vocab_file, job.merge_file, job.chat_template))):
        if os.path.exists(read) and any(path.samefile(read) for path in written):
            raise ConfigError(f"--output-prefix {prefix} would write {read}, which is read: name another")


def _write(
    job: Job,
    tokenizer: Tokenizer,
    done: Milestone | None,
    summary: Summary,
    report: Callable[[Summary], None],
    log_skipped: Callable[[str], None],
) -> None:
    """Write the data sets, continuing after the milestone ``done``, and the files next to them."""
    with signals_raised(), ExitStack() as stack:
        builders = {
            key: stack.enter_context(
                IndexedDatasetBuilder(
                    prefix, job.dtype_of(key, tokenizer.vocab_size), done.outputs[key] if done else None
                )
            )
            for key, prefix in job.prefixes.items()
        }
        if done is None:
            job.journal.remove()
        images = job.images
        writer = image_writer(job.prefixes[TOKENS], images.size, images.fit) if images else None
        add_images = stack.enter_context(writer) if writer else None
        tokenize = tokenize_images if job.images else tokenize_chunk
        results = _map_in_order(partial(tokenize, job), _chunks(job, done), job.workers)
        for number, tokenized in enumerate(stack.enter_context(closing(results)), start=1):
            _write_chunk(builders, tokenized, summary, log_skipped if job.skip_errors else None)
            if add_images:
                for images_of_document in tokenized.images:
                    add_images(images_of_document)
            report(summary)
            if number % MILESTONE_CHUNKS == 0 and not job.images:
                outputs = {key: builder.sync() for key, builder in builders.items()}
                job.journal.write(Milestone(tokenized.position, outputs, summary))
                for builder in builders.values():
                    builder.keeps = True
        if not summary.documents:
            places = ", ".join(map(str, job.inputs))
            if summary.empty:
                raise DataError(
                    f"{places}: no document has a token: their texts are empty, or the tokenizer removes them"
                )
            raise DataError(f"no document in {places}: nothing to write")
        _check_vocabulary(job, summary)
        for builder in builders.values():
            builder.finish()
        if template := chat_template_of(job):
            with replace_file(chat_template_file(job.prefixes[TOKENS]), text=True) as file:
                file.write(record_of(template))
        for key in builders.keys() - {LOSS_MASK}:
            write_tokenizer(job.prefixes[key], tokenizer)


def _chunks(job: Job, done: Milestone | None) -> Iterator[Chunk]:
    """The chunks of all inputs, without the chunks before the milestone ``done``."""
    inputs, chunks = done.position if done else (0, 0)
    for number, path in enumerate(job.inputs[inputs:], inputs):
        file_chunks = (
            read_image_chunks(path)
            if job.images
            else read_chunks(path, job.format_of(path), job.json_keys, size=job.chunk_bytes)
        )
        for count, chunk in islice(enumerate(file_chunks, start=1), chunks, None):
            yield chunk._replace(position=(number, count))
        chunks = 0


def _map_in_order(
    function: Callable[[Any], Tokenized], chunks: Iterable, workers: int
) -> Generator[Tokenized, None, None]:
    """Map ``function`` over ``chunks`` in order, in ``workers`` processes; at most two chunks per process wait."""
    if workers == 1:
        yield from map(function, chunks)
        return
    with started_pool(workers, "--workers", partial(exit_with_parent, os.getpid())) as pool:
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


def _write_chunk(
    builders: Mapping[str, IndexedDatasetBuilder],
    tokenized: Tokenized,
    summary: Summary,
    log_skipped: Callable[[str], None] | None,
) -> None:
    """Write the documents of a chunk and update ``summary``.

    Raises DataError for the first malformed line if ``log_skipped`` is None. A document without text is not malformed.
    """
    for error in tokenized.errors:
        if log_skipped is None and not error.is_empty:
            raise DataError(f"{error.message} (--on-error skip skips such lines)")
        if log_skipped is not None:
            log_skipped(error.message)
        summary.empty += error.is_empty
        summary.bad_lines += not error.is_empty
    for key, builder in builders.items():
        builder.add_documents(tokenized.tokens[key], tokenized.sizes[key])
        if key == LOSS_MASK:
            summary.counted += int(tokenized.tokens[key].sum(dtype=np.int64))
            continue
        summary.documents += len(tokenized.sizes[key])
        summary.tokens += len(tokenized.tokens[key])
    summary.images += sum(map(len, tokenized.images))
    summary.blank += tokenized.blank
    summary.unknown += tokenized.unknown
    summary.input_bytes += tokenized.text_bytes


def _check_vocabulary(job: Job, summary: Summary) -> None:
    """Raises DataError if none of the words of the text is in the vocabulary."""
    words = summary.tokens - (summary.documents if job.append_eod else 0)
    if summary.unknown == words:
        raise DataError(
            f"none of the {words:,} words of {', '.join(map(str, job.inputs))} is in --vocab-file {job.vocab_file}: "
            "give the vocabulary that was made for this text (tools/train_tokenizer.py makes one)"
        )


def _hint(journal: Journal) -> str:
    return "; --resume continues from the last milestone" if journal.path.exists() else ""
