"""Hashes of the content of data sets and tokenizers, regardless of their paths and dates. No torch here."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megatron.common.reading import read_bytes, regular
from megatron.config.data import chat_template_file
from megatron.config.tokenizer_files import PUBLISHED

BLOCK = 1 << 16
"""Bytes read at a time."""
BLOCKS = 64
"""Blocks read of a large token file."""


def data_hash(prefix: str) -> str:
    """SHA-256 over the size of PREFIX.bin, all of PREFIX.idx, and 64 blocks of 64 KiB of PREFIX.bin.

    The blocks are evenly spaced, including the first and the last bytes; up to 4 MiB they are the
    whole file. In a longer one, tokens changed in place between two blocks are not detected.
    """
    digest = hashlib.sha256()
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    digest.update(f"{tokens.stat().st_size}\n".encode())
    for path, offsets in ((index, range(0, index.stat().st_size, BLOCK)), (tokens, _sampled(tokens))):
        with open(path, "rb", opener=regular) as file:
            for offset in offsets:
                file.seek(offset)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def blend_hash(contents: Sequence[Sequence[str]]) -> str:
    """A hash of the blends of a run, given the prefixes of each. For a single data set it is ``data_hash``."""
    if len(contents) == 1 and len(contents[0]) == 1:
        return data_hash(contents[0][0])
    hashes = [[data_hash(prefix) for prefix in prefixes] for prefixes in contents]
    return hashlib.sha256(repr(hashes).encode()).hexdigest()


def tokenizer_hash(kind: str, *files: str | None, eod: int | None = None) -> str:
    """SHA-256 over the kind of a tokenizer and the content of its files.

    Of a kind of ``PUBLISHED`` also over ``eod``, the end of a document, which is all that other files decide.
    """
    digest = hashlib.sha256(kind.encode())
    if kind in PUBLISHED:
        digest.update(f"\nend of document {eod}".encode())
    for file in files:
        content = b"" if file is None else read_bytes(file)
        digest.update(f"\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def common_chat_template(prefixes: Sequence[str]) -> str:
    """What the chat template files of data sets hold; empty if there are none, or different ones."""
    files = [path for prefix in prefixes if (path := Path(chat_template_file(prefix))).is_file()]
    contents = {read_bytes(path) for path in files}
    return contents.pop().decode() if len(contents) == 1 else ""


def _sampled(path: Path) -> Sequence[int]:
    size = path.stat().st_size
    if size <= BLOCK * BLOCKS:
        return range(0, size, BLOCK)
    return [part * (size - BLOCK) // (BLOCKS - 1) for part in range(BLOCKS)]
