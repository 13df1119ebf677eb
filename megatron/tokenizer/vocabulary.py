"""Reading a vocabulary from disk, with all that can be wrong about it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.errors import DataError

EOD = "<|endoftext|>"
"""Token that ends a document."""
UNK = "<unk>"
"""Token that stands for every word a vocabulary does not know."""


def require_files(kind: str, files: Mapping[str, str | None]) -> None:
    """Check that each flag of ``files`` names an existing file. Raises DataError with a line for each that does not."""
    problems = []
    for flag, path in files.items():
        if path is None:
            problems.append(f"{flag} is not given: {kind} needs it (tools/train_tokenizer.py makes one)")
        elif not Path(path).is_file():
            fault = "is a folder" if Path(path).is_dir() else "no such file"
            problems.append(f"{flag} {path}: {fault} (tools/train_tokenizer.py makes one)")
    if problems:
        raise DataError(problems)


def read_text(path: str) -> str:
    """The text of a UTF-8 file. Raises DataError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; is this the right file?") from error


def read_vocab_json(path: str, required: Iterable[str]) -> dict[str, int]:
    """The token -> id table of a ``vocab.json``.

    Raises DataError if the file is not such a table, if its ids are not 0 to n-1, each once, or if a
    token of ``required`` is absent.
    """
    try:
        vocabulary = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); a vocabulary is one object of token: id"
        ) from error
    if not isinstance(vocabulary, dict):
        raise DataError(f"{path}: a JSON {type(vocabulary).__name__}; a vocabulary is one object of token: id")
    check_ids(path, vocabulary)
    for token in required:
        if token not in vocabulary:
            raise DataError(f"{path}: the vocabulary lacks {token}; add it with the id {len(vocabulary)}")
    return vocabulary


def check_ids(path: str, vocabulary: Mapping[str, Any]) -> None:
    """Raises DataError unless the ids are the integers 0 to n-1, each once."""
    # By type, for True is an int to isinstance.
    wrong = next((token for token, id in vocabulary.items() if type(id) is not int), None)
    if wrong is not None:
        raise DataError(f"{path}: the id of {wrong!r} is {vocabulary[wrong]!r}; ids are integers")
    absent = set(range(len(vocabulary))) - set(vocabulary.values())
    if absent:
        raise DataError(
            f"{path}: {len(vocabulary)} tokens need the ids 0 to {len(vocabulary) - 1}, each once; "
            f"no token has {min(absent)}"
        )


def check_known(ids: Sequence[int], vocab_size: int) -> None:
    """Raises DataError if an id is outside a vocabulary of ``vocab_size`` tokens."""
    stranger = next((id for id in ids if not 0 <= id < vocab_size), None)
    if stranger is not None:
        raise DataError(
            f"token {stranger} is not in the vocabulary of {vocab_size} tokens; "
            "use the vocabulary that the tokens were made with"
        )
