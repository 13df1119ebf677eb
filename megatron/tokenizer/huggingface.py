"""The tokenizers that Hugging Face publishes with models, from their tokenizer.json, run by the library ``tokenizers``.

The ids are those of a fast tokenizer of ``transformers`` that loads the same folder.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from megatron.common.errors import DataError
from megatron.common.reading import read_json
from megatron.tokenizer.base import RustTokenizer, read_text, require_files

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
"""Files beside a tokenizer.json that name its special tokens, the most specific first."""


class HuggingFaceTokenizer(RustTokenizer):
    """A tokenizer.json: GPT-2, Llama 3, Qwen, Mistral and others.

    ``tokenize`` adds no special token, neither at the beginning nor at the end, and does not look for special tokens in
    texts: a document cannot end itself by quoting one. (``transformers`` looks for them unless it is given
    ``split_special_tokens=True``.) ``detokenize`` spells special tokens out; an id without a token has no text.
    Of a WordLevel or Unigram model a text is not safe: a special token may be one of its words.

    Attributes:
        path: the tokenizer.json.
        vocab_size: its tokens with the added ones (or the highest id and one, if ids are left out), or the size that is
            asked for, if the model has more rows.
        tokens: the same without these rows.
        eod: the eos_token that a file beside it names, of ``CONFIG_FILES`` the first that does.
        bos: id of the bos_token that such a file names, which begins texts of some models; None without one.
        special_tokens: ids of the special tokens by their text.
        pieces: ids of all tokens by their text.
    """

    def __init__(
        self,
        vocab_file: str | None,
        merge_file: str | None = None,
        *,
        vocab_size: int | None = None,
        eod_token: str | None = None,
    ) -> None:
        """Read the tokenizer.json ``vocab_file`` and the files beside it. There is no file of merges.

        Raises DataError if a file is absent or broken, no token ends a document, or ``vocab_size`` is too small.
        """
        self.path = require_files("HuggingFaceTokenizer", {"--tokenizer-model": vocab_file}, "")[0]
        configs = dict(_read_configs(os.path.dirname(self.path)))
        encoder = _read_encoder(self.path, configs.get("tokenizer_config.json", {}))
        encoder.encode_special_tokens = True  # as ordinary text
        self.pieces = encoder.get_vocab(with_added_tokens=True)
        added = encoder.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in sorted(added.items()) if token.special}
        size = max(self.pieces.values(), default=-1) + 1
        super().__init__(encoder, checked_size(self.path, size, vocab_size))
        self.tokens = size
        self.bos = self._special("bos", configs, None)
        eod = self._special("eos", configs, eod_token)
        if eod is None:
            examples = f", such as {' or '.join([*self.special_tokens][:4])}" if self.special_tokens else ""
            raise DataError(
                f"{self.path}: no file beside it names an eos_token, which ends documents: choose a token with "
                f"--eod-token{examples}"
            )
        self.eod = eod

    def _special(self, role: str, configs: Mapping[str, Mapping[str, Any]], chosen: str | None) -> int | None:
        """The id of the ``eos`` or ``bos`` token: ``chosen``, or what the first file names that does."""
        if chosen is not None:
            return self._id(f"--eod-token {chosen}", chosen)
        for name, config in configs.items():
            place = f"{os.path.join(os.path.dirname(self.path), name)}: {role}_token"
            token, id = config.get(f"{role}_token"), config.get(f"{role}_token_id")
            if isinstance(token, dict):
                token = token.get("content")
            if token is not None:
                return self._id(f"{place} {token!r}", token)
            if isinstance(id, list) and id:
                id = id[0]
            if id is not None:
                if type(id) is not int or not 0 <= id < self.vocab_size:
                    raise DataError(f"{place}_id {id!r} is none of the {self.vocab_size} tokens of {self.path}")
                return id
        return None

    def _id(self, place: str, token: Any) -> int:
        if not isinstance(token, str) or token not in self.pieces:
            raise DataError(f"{place} is not in the vocabulary of {self.path}: choose one of its tokens")
        return self.pieces[token]


def checked_size(path: str, tokens: int, rows: int | None) -> int:
    """``rows``, or ``tokens`` if that is None. Raises DataError if there are fewer rows than tokens."""
    if rows is not None and rows < tokens:
        raise DataError(
            f"{path} has {tokens} tokens, and the table of the model {rows} rows (--vocab-size): give the tokenizer of "
            f"the model, or {tokens} rows or more"
        )
    return tokens if rows is None else rows


def _read_configs(folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and content of each of ``CONFIG_FILES`` in ``folder``. Raises DataError for one that is broken."""
    for name in CONFIG_FILES:
        path = os.path.join(folder, name)
        try:
            config = read_json(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise DataError(f"{path}: not JSON ({error})") from None
        if not isinstance(config, dict):
            raise DataError(f"{path}: a JSON {type(config).__name__}, not an object")
        yield name, config


def _read_encoder(path: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, with the tokens that its tokenizer_config.json adds. Raises DataError."""
    text = read_text(path)
    try:
        encoder = tokenizers.Tokenizer.from_str(text)
        encoder.no_padding()
        encoder.no_truncation()
    except Exception as error:  # the library raises no class of its own
        raise DataError(f"{path}: not a tokenizer.json ({error}); is the file whole?") from None
    added = config.get("added_tokens_decoder") or {}
    try:
        missing = [
            (int(id), token) for id, token in added.items() if encoder.token_to_id(str(token["content"])) is None
        ]
        for id, token in sorted(missing, key=lambda pair: pair[0]):
            encoder.add_tokens([tokenizers.AddedToken(**{name: token[name] for name in _ADDED if name in token})])
            if encoder.token_to_id(token["content"]) != id:
                raise ValueError(f"{token['content']!r} cannot have the id {id}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        beside = os.path.join(os.path.dirname(path), "tokenizer_config.json")
        raise DataError(f"{beside}: its added_tokens_decoder does not fit {path} ({error})") from None
    return encoder


_ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Properties of an added token."""
