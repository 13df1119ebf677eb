"""Hashes of data sets and tokenizers, and the record of the tokenizer that made a data set. No torch here.

Hashes do not depend on the paths and modification times of files.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.common.errors import DataError
from megatron.common.files import replace_file
from megatron.common.reading import LARGEST_SETTINGS, is_present, parse_json, read_bytes, regular
from megatron.common.tokenizer_files import PUBLISHED
from megatron.data.map_cache import CHECKED_ONCE, cached_numbers, from_random_start
from megatron.data.map_cache import digest as hash_of
from megatron.tokenizer import Tokenizer

PIECE = 1 << 22
"""Bytes of an index that are read at a time."""
BLOCK = 1 << 16
"""Bytes read at a time of a token file."""
BLOCKS = 64
"""Blocks read of a large token file."""
_REMEDY = "make the data set again, or remove this file"


def data_hash(prefix: str, cache: Path | None = None) -> str:
    """SHA-256 over the size of PREFIX.bin, all of PREFIX.idx, and 64 blocks of 64 KiB of PREFIX.bin.

    The blocks are evenly spaced, including the first and the last bytes, and cover files of up to 4 MiB completely. In
    a larger file, a change between two blocks is not detected. The hash of a data set with a large index is kept in
    the folder ``cache``, for files of the same sizes and modification times.
    """
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if cache is None or index.stat().st_size < CHECKED_ONCE:
        return _data_hash(tokens, index)
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in (tokens.stat(), index.stat())]
    name, find = f"{index.stem}_{hash_of(stats)}", lambda: [*bytes.fromhex(_data_hash(tokens, index))]
    return cached_numbers(cache, name, "hash", np.uint8, 32, find).tobytes().hex()


def _data_hash(tokens: Path, index: Path) -> str:
    digest = hashlib.sha256()
    digest.update(f"{tokens.stat().st_size}\n".encode())
    pieces = range(0, index.stat().st_size, PIECE)
    for path, offsets, length in ((index, pieces, PIECE), (tokens, _block_offsets(tokens), BLOCK)):
        with open(path, "rb", opener=regular) as file:
            for offset in offsets:
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def blend_hash(contents: Sequence[Sequence[str]], cache_of: Callable[[str], Path | None] = lambda prefix: None) -> str:
    """A hash of the data of a run, given the prefixes of each blend. For a single data set it is ``data_hash``.

    The hash of several data sets is kept in the cache folder of the first one, if their indexes are large.
    """
    prefixes = [prefix for blend in contents for prefix in blend]
    cache = cache_of(prefixes[0])
    if len(contents) == len(prefixes) == 1:
        return data_hash(prefixes[0], cache)
    stats = [Path(f"{prefix}.{ending}").stat() for prefix in prefixes for ending in ("bin", "idx")]
    file = None
    if cache is not None and min(index.st_size for index in stats[1::2]) >= CHECKED_ONCE:
        file = cache / f"blend_{hash_of((contents, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))}_hash"
        with contextlib.suppress(OSError, ValueError):
            return bytes.fromhex(file.read_text()).hex()
    hash_by_prefix = {prefix: data_hash(prefix, cache_of(prefix)) for prefix in from_random_start(prefixes)}
    hashes = [[hash_by_prefix[prefix] for prefix in blend] for blend in contents]
    total = hashlib.sha256(repr(hashes).encode()).hexdigest()
    if file is not None:
        with contextlib.suppress(OSError), replace_file(file, text=True, durable=False) as cached_hash:
            cached_hash.write(total)
    return total


def tokenizer_hash(kind: str, *files: str | None, eod: int | None = None) -> str:
    """SHA-256 over the kind of a tokenizer and the content of its files.

    For a kind of ``PUBLISHED`` also over ``eod``, the end-of-document token: config files next to them choose it.
    """
    digest = hashlib.sha256(kind.encode())
    if kind in PUBLISHED:
        digest.update(f"\nend of document {eod}".encode())
    for file in files:
        content = b"" if file is None else read_bytes(file)
        digest.update(f"\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def chat_template_file(prefix: str) -> Path:
    """The file with the chat template of the conversations in the data set at ``prefix``."""
    return Path(f"{prefix}_chat_template.json")


def common_chat_template(prefixes: Sequence[str]) -> str:
    """The chat template of the data sets; empty if they have none, or different ones. Raises DataError if damaged."""
    contents = set()
    for path in map(chat_template_file, prefixes):
        if not is_present(path):
            continue
        try:
            contents.add(content := read_bytes(path, largest=LARGEST_SETTINGS))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        if not is_chat_template(content):
            raise DataError(f"{path}: not the chat template of a data set: make the data set again")
    return contents.pop().decode() if len(contents) == 1 else ""


def is_chat_template(record: str | bytes) -> bool:
    """Whether ``record`` is a template, or several by name, with its special tokens, as a data set stores it."""
    try:
        content: Any = parse_json(record)
        source = content["chat_template"]
        named = source if isinstance(source, list) else [{"template": source}]
        texts = (*content["special_tokens"].values(), *(text for entry in named for text in entry.values()))
        return all(isinstance(text, str | None) for text in texts)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def write_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """Record in PREFIX.tokenizer.json that ``tokenizer`` made the data set."""
    with replace_file(_tokenizer_file(prefix), text=True) as file:
        json.dump(_identity(tokenizer), file, indent=2)


def without_tokenizer(prefixes: Iterable[str]) -> list[str]:
    """The data sets without a record of the tokenizer that made them."""
    return [prefix for prefix in prefixes if not is_present(_tokenizer_file(prefix))]


def other_tokenizers(prefixes: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    """A message for each data set that another tokenizer made. Raises DataError for a record that is broken.

    A NullTokenizer, which has no files, is accepted for any data set.
    """
    if not tokenizer.source:
        return []
    own = _identity(tokenizer)
    made = {prefix: _read_identity(_tokenizer_file(prefix)) for prefix in prefixes}
    return [
        f"{prefix} was made with another tokenizer: {_describe(record)}, and this is {_describe(own)}; use the "
        "tokenizer of the data set, or add --override if both give the same tokens"
        for prefix, record in made.items()
        if record is not None and not _is_same(record, own)
    ]


def _tokenizer_file(prefix: str) -> Path:
    return Path(f"{prefix}.tokenizer.json")


def _identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """Kind, hash of the files and special tokens. The order of entries in a vocabulary file does not matter."""
    kind, *files = tokenizer.source
    special = {name: id for name in ("eod", "bos", "unk") if (id := getattr(tokenizer, name)) is not None}
    digest = hashlib.sha256()
    for file in filter(None, files):
        content = read_bytes(file)
        if kind not in PUBLISHED:
            is_json = file.endswith(".json")
            lines = [line.rstrip() for line in content.splitlines() if not line.startswith(b"#version")]
            content = json.dumps(parse_json(content), sort_keys=True).encode() if is_json else b"\n".join(lines)
        digest.update(f"\n{len(content)}\n".encode() + content)
    return {"tokenizer_type": kind, "hash": digest.hexdigest(), "special_tokens": special}


def _read_identity(path: Path) -> Mapping[str, Any] | None:
    if not is_present(path):
        return None
    try:
        record = parse_json(read_bytes(path, largest=BLOCK))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}: {_REMEDY}") from None
    except ValueError:
        record = None
    fields = (("tokenizer_type", str), ("hash", str), ("special_tokens", dict))
    if isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in fields):
        if all(type(id) is int for id in record["special_tokens"].values()):
            return record
    raise DataError(f"{path} does not name a tokenizer: {_REMEDY}")


def _is_same(record: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    if any(record[name] != own[name] for name in ("tokenizer_type", "hash")):
        return False
    # Config files choose the special tokens of a published tokenizer; other kinds have them in their vocabulary.
    shared = (
        record["special_tokens"].keys() & own["special_tokens"].keys() if own["tokenizer_type"] in PUBLISHED else ()
    )
    return all(record["special_tokens"][name] == own["special_tokens"][name] for name in shared)


def _describe(record: Mapping[str, Any]) -> str:
    special = ", ".join(f"{name} {id}" for name, id in record["special_tokens"].items())
    return f"{record['tokenizer_type']} {record['hash'][:12]} ({special})"[:200]


def _block_offsets(path: Path) -> Sequence[int]:
    size = path.stat().st_size
    if size <= BLOCK * BLOCKS:
        return range(0, size, BLOCK)
    return [part * (size - BLOCK) // (BLOCKS - 1) for part in range(BLOCKS)]
