"""Tokenizes the documents of a chunk of text in a worker process.

In conversations the turns of the assistant count in the loss, and after a prompt its completion. A conversation is
tokenized as one text, as in transformers, and a token counts if any of its characters is in such a turn. A prompt and
its completion are tokenized separately, as in generation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tools.chat.files import chat_template
from megatron.tools.chat.template import ChatTemplate
from megatron.tools.chat.tokens import Text, puts_blank, tokenize_continuation, tokenize_texts
from megatron.tools.preprocess.corpus import FORMATS, Chunk, json_object, line_texts
from megatron.tools.preprocess.job import LOSS_MASK, TOKENS, Job


class LineError(NamedTuple):
    """An error in a line."""

    line: int
    message: str
    is_empty: bool
    """Whether the line is well-formed but has no text."""


class Tokenized(NamedTuple):
    """The tokenized documents of a chunk."""

    tokens: dict[str, np.ndarray]
    """For each key: all tokens, documents concatenated."""
    sizes: dict[str, list[list[int]]]
    """For each key: number of tokens of each sequence of each document."""
    unknown: int
    """Tokens of words that are not in the vocabulary."""
    errors: list[LineError]
    text_bytes: int
    position: tuple[int, int]
    """See ``Chunk.position``."""
    blank: int = 0
    images: Sequence[Sequence[np.ndarray]] = ()
    """For conversations with images: the images of each document."""


Documents = dict[str, list[list[np.ndarray]]]
"""For each key: the sequences of each document, [tokens]; none for a document without tokens."""


def tokenize_chunk(job: Job, chunk: Chunk) -> Tokenized:
    """Read and tokenize the lines of a chunk; runs in a worker."""
    tokenizer = tokenizer_of(job)
    numbers, contents, errors = _read_lines(job, chunk)
    tokenize = _tokenize_keys if job.conversations is None else _tokenize_conversations
    try:
        parts = [tokenize(job, tokenizer, contents)]
    except DataError:  # one of the texts: find out which
        parts, lines, numbers = [], zip(numbers, contents, strict=True), []
        for number, content in lines:
            try:
                parts.append(tokenize(job, tokenizer, [content]))
                numbers.append(number)
            except DataError as error:
                errors.add(LineError(number, f"{chunk.path}:{number}: {error}", is_empty=False))
    documents = {key: [document for part in parts for document in part[key]] for key in job.prefixes}
    blank = 0
    for key in documents:
        without = [number for number, document in zip(numbers, documents[key], strict=True) if not document]
        if FORMATS[job.format_of(chunk.path)].allows_blank_lines:
            blank += len(without)
        else:
            is_text = job.conversations is None
            what = f'no text under "{key}"' if is_text else "no token to train on"
            errors |= {LineError(line, f"{chunk.path}:{line}: {what}", is_empty=is_text) for line in without}
    return joined(job, chunk, documents, sorted(errors), chunk.size)._replace(blank=blank)


def joined(job: Job, chunk: Chunk, documents: Documents, errors: list[LineError], text_bytes: int) -> Tokenized:
    """The ``documents`` of a chunk in the form in which they are written."""
    tokenizer, tokens, sizes, unknown = tokenizer_of(job), {}, {}, 0
    for key in documents:
        dtype, pieces = job.dtype_of(key, tokenizer.vocab_size), chain.from_iterable(documents[key])
        tokens[key] = np.concatenate([np.empty(0, dtype), *pieces], dtype=dtype, casting="unsafe")
        sizes[key] = [[len(ids) for ids in document] for document in documents[key] if document]
        if key != LOSS_MASK and tokenizer.unk is not None:
            unknown += int(np.count_nonzero(tokens[key] == tokenizer.unk))
    return Tokenized(tokens, sizes, unknown, errors, text_bytes, chunk.position)


def _read_lines(job: Job, chunk: Chunk) -> tuple[list[int], list[Any], set[LineError]]:
    """Numbers and contents of the valid lines (texts of keys, or parts of a conversation), and errors of the others."""
    template = chat_template_of(job)
    numbers, contents, errors = [], [], set()
    for number, line in enumerate(chunk.lines, chunk.first_line):
        where = f"{chunk.path}:{number}"
        try:
            if job.conversations is None:
                content: Any = line_texts(chunk.path, job.input_format, number, line, job.json_keys)
            else:
                assert isinstance(line, bytes), "a rule rejects Parquet"
                content = line_documents(where, line, job.conversations, template)
        except DataError as error:
            errors.add(LineError(number, str(error), is_empty=False))
            if not job.skip_errors:  # the job will fail: do not run a slow template on the other lines
                break
            continue
        numbers.append(number)
        contents.append(content)
    return numbers, contents, errors


def _tokenize_keys(job: Job, tokenizer: Tokenizer, lines: Sequence[Sequence[str]]) -> Documents:
    """Tokenize lines that are a text for each key: a document per line for each key."""
    split = partial(split_sentences, keep_newlines=job.keep_newlines) if job.split_sentences else lambda text: [text]
    begin = np.array([tokenizer.bos] if job.prepend_bos else [], int)
    end = np.array([tokenizer.eod] if job.append_eod else [], int)
    documents: Documents = {}
    for column, key in enumerate(job.json_keys):
        parts = [split(line[column]) for line in lines]
        ids = iter(tokenizer.tokenize_arrays(list(chain.from_iterable(parts))))
        documents[key] = [[tokens for tokens in islice(ids, len(part)) if len(tokens)] for part in parts]
        for document in filter(None, documents[key]):
            document[0] = np.concatenate([begin, document[0]])
            document[-1] = np.concatenate([document[-1], end])
    return documents


def _tokenize_conversations(job: Job, tokenizer: Tokenizer, lines: Sequence[Sequence[Text]]) -> Documents:
    """Tokenize lines that are parts of a conversation: a document and a loss mask per line.

    A document without a token that counts in the loss is empty; the first token never counts, and the end-of-document
    token counts if the token before it does. Texts of special tokens are encoded as special tokens.
    """
    documents: Documents = {TOKENS: [], LOSS_MASK: []}
    tokenized = iter(tokenize_texts(tokenizer, list(chain.from_iterable(lines))))
    is_apart = puts_blank(tokenizer)
    for line in lines:
        ids: list[int] = []
        mask: list[int] = []
        for part, (part_ids, part_mask) in zip(line, islice(tokenized, len(line)), strict=True):
            if ids and is_apart:
                part_ids = tokenize_continuation(tokenizer, part.text)
                part_mask = [1] * len(part_ids)
            ids += part_ids
            mask += part_mask
        if job.append_eod:
            ids.append(tokenizer.eod)
            mask += mask[-1:] or [0]
        counts_any = any(mask[1:])
        documents[TOKENS].append([np.array(ids)] if counts_any else [])
        documents[LOSS_MASK].append([np.array([0, *mask[1:]])] if counts_any else [])
    return documents


@lru_cache(maxsize=1)
def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer of the job, built once in a process and inherited by forked workers."""
    return build_tokenizer(job.tokenizer_type, job.vocab_file, job.merge_file, eod_token=job.eod_token)


@lru_cache(maxsize=1)
def chat_template_of(job: Job) -> ChatTemplate | None:
    """The chat template of the job; its sandbox process starts on first use."""
    return None if job.chat_template is None else chat_template(job.chat_template, tokenizer_of(job))


ABBREVIATIONS = frozenset(
    "adj adm adv al approx assn ave bldg bros brig ca capt cf ch chap cmdr co col comdr corp cpl dept dist dr ed eds "
    "e.g eg eq esp est et ext fig figs fn fr ft gen gov hon hr i.e ie inc incl inst jr lt ltd maj messrs mgr "
    "mr mrs ms mt mts mx orig p pp ph.d phd prof pvt rep rev resp sen sgt sr st supt trans "
    "univ v viz vol vols vs".split()
)
"""Abbreviations after which a period does not end a sentence, in lower case and without their last period."""

_BLANK_LINES = re.compile(r"(\n\s*\n)")
_END = re.compile(
    r"""(?<![.!?\u2026])[.!?\u2026]+["'\u2019\u201d\u00bb)\]]*\s+(?=["'\u2018\u201c\u00ab(\[]*[^\W_a-z]|["'\u2018\u201c\u00ab(\[]*[^\w\s])"""
    r"""|[\u3002\uff01\uff1f]+["'\u2019\u201d\u300d\u300f)\]]*\s*"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'\u2018\u201c]+$")


_LONGER_THAN_ABBREVIATIONS = 64
"""Characters before a period in which an abbreviation is looked for."""


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Split ``text`` into its sentences, in order.

    White space around a sentence is removed; with ``keep_newlines`` it is kept at the end of the sentence, so that the
    sentences joined are the text.
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
    """``text`` cut after each sentence and its following white space; some pieces are only white space."""
    paragraphs, blank_lines = (parts := _BLANK_LINES.split(text))[::2], [*parts[1::2], ""]
    for paragraph, blank in zip(paragraphs, blank_lines, strict=True):
        start = 0
        for end in _END.finditer(paragraph):
            if not _is_abbreviation(paragraph[start : end.start()], end.group()):
                yield paragraph[start : end.end()]
                start = end.end()
        yield paragraph[start:] + blank


def _is_abbreviation(before: str, mark: str) -> bool:
    """Whether ``mark`` is a single period that belongs to an abbreviation at the end of ``before``."""
    if mark.rstrip() != ".":
        return False
    match = _LAST_WORD.search(before[-_LONGER_THAN_ABBREVIATIONS:])
    word = match.group() if match else ""
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


KEYS: Mapping[str, tuple[str, ...]] = {"messages": ("messages",), "prompt-completion": ("prompt", "completion")}
"""Values of --format, and the keys that each reads from a JSON object."""


def line_documents(where: str, line: bytes, kind: str, template: ChatTemplate | None) -> list[Text]:
    """The texts of a JSON line of format ``kind``; none for a blank line.

    Raises DataError that begins with ``where`` if the line is malformed.
    """
    document = json_object(where, line)
    if document is None:
        return []
    for key in KEYS[kind]:
        if key not in document:
            raise DataError(f'{where}: no key "{key}", which --format {kind} reads')
    if template is not None:
        return [_conversation(where, document, template)]
    if not all(isinstance(document[key], str) for key in KEYS[kind]):
        raise DataError(f"{where}: {' and '.join(KEYS[kind])} must be strings")
    prompt, completion = (document[key] for key in KEYS[kind])
    return [Text(prompt), Text(completion, [(0, len(completion))])]


_NOT_READ = ("chat_template_kwargs", "functions")
"""Keys of conversations for other programs."""


def _conversation(where: str, document: Mapping[str, Any], template: ChatTemplate) -> Text:
    messages = document["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise DataError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    for key in filter(document.get, _NOT_READ):
        raise DataError(f'{where}: "{key}" would change the text, and is not read: write it into the template')
    try:
        text = template.conversation(messages, document.get("tools"))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message of the assistant: nothing to train on")
    return text
