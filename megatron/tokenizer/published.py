"""Tokenizers that are published with models: Hugging Face's tokenizer.json, and SentencePiece models.

The library ``tokenizers`` runs a tokenizer.json. The ids are the same as the ids of a fast tokenizer of
``transformers`` that loads the same folder, unless its class builds another tokenizer from the vocabulary.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tokenizers

from megatron.common.errors import ConfigError, DataError, shown
from megatron.common.processes import failure_in_child
from megatron.common.reading import parse_json
from megatron.tokenizer.base import (
    RustTokenizer,
    Tokenizer,
    library_errors,
    read_file,
    read_object,
    read_text,
    require_files,
)
from megatron.tokenizer.growth import LONGEST_TOKEN, check_growth

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
"""Files next to a tokenizer.json that name its special tokens, the most specific first."""


class HuggingFaceTokenizer(RustTokenizer):
    """The tokenizer of a tokenizer.json: GPT-2, Llama 3, Qwen, Mistral and others.

    ``tokenize`` adds no special token, neither at the beginning nor at the end, and does not look for special tokens in
    texts: a document cannot end itself by quoting one. (``transformers`` looks for them unless it is given
    ``split_special_tokens=True``.) ``detokenize`` writes special tokens as text; an id without a token has no text.
    WordLevel and Unigram models are an exception: a special token may be a word of their vocabulary.

    Attributes:
        vocab_size: the highest id plus one, including added tokens, or the argument ``vocab_size``.
        eod: id of the eos_token in the first of ``CONFIG_FILES`` that has one.
        other_ends: the eos_token_id, one or several, of generation_config.json, or else of config.json.
        bos: id of the bos_token in these files, with which texts of some models begin; None without one.
        special_tokens: ids of the special tokens by their text.
        added_tokens: texts of these and of tokens that every text may contain, such as ``<think>``.
        pieces: ids of all tokens by their text.
        has_dropout: whether the file enables BPE dropout, which is disabled here.
    """

    tokens: int

    def __init__(self, vocab_file: str | None, *, vocab_size: int | None = None, eod_token: str | None = None) -> None:
        """Read the tokenizer.json ``vocab_file`` and the files next to it.

        Raises DataError if a file is absent or broken, no token ends a document, or ``vocab_size`` is too small.
        """
        self.path = require_files("HuggingFaceTokenizer", {"--tokenizer-model": vocab_file}, "")[0]
        configs = _read_configs(os.path.dirname(self.path))
        encoder = read_encoder(self.path, configs.get("tokenizer_config.json", {}))
        encoder.encode_special_tokens = True  # as ordinary text
        self.has_dropout = bool(getattr(encoder.model, "dropout", None))
        if self.has_dropout:  # with dropout of merges, the tokens of a text would be random
            encoder.model.dropout = None
        self.pieces = encoder.get_vocab(with_added_tokens=True)
        _check_pieces(self.path, encoder, self.pieces)
        added = encoder.get_added_tokens_decoder()
        self._normalized = _normalized_tokens(self.path, encoder) if encoder.normalizer else []
        self.special_tokens = {token.content: id for id, token in sorted(added.items()) if token.special}
        self.added_tokens = [token.content for token in added.values()]
        size = max(self.pieces.values(), default=-1) + 1
        if size > _MOST_TOKENS:
            raise DataError(f"{self.path}: a token has the id {size - 1}, and no vocabulary has {_MOST_TOKENS} tokens")
        self._encoder, self.vocab_size, self.tokens = encoder, checked_size(self.path, size, vocab_size), size
        self.bos = self._special("bos", configs, None)
        with suppress(DataError, IndexError), library_errors(self.path):  # an error of this text, not of the tokenizer
            self.adds_bos = encoder.encode("a").ids[0] == self.bos
        eod = self._special("eos", configs, eod_token)
        if eod is None:
            examples = f", such as {' or '.join([*self.special_tokens][:4])}" if self.special_tokens else ""
            raise DataError(
                f"{self.path}: no file beside it names an eos_token, which ends documents: choose a token with "
                f"--eod-token{examples}"
            )
        self.eod = eod
        self.other_ends = frozenset(id for id in self._given_ends(configs) if 0 <= id < self.vocab_size)

    def respelled_tokens(self, text: str, tokens: Collection[str]) -> Counter[str]:
        """How often the tokenizer reads each of ``tokens`` in ``text`` after normalizing both, such as ``<|END|>`` in
        lower case."""
        if not (names := [name for name in self._normalized if name in tokens]):
            return Counter()
        with library_errors(self.path):
            normalize = self._encoder.normalizer.normalize_str
            whole = normalize(text)
            return Counter({name: max(map(whole.count, {normalize(name), name} - {""}), default=0) for name in names})

    def _special(self, role: str, configs: Mapping[str, Mapping[str, Any]], chosen: str | None) -> int | None:
        """The id of the ``eos`` or ``bos`` token: ``chosen``, or the token in the first of ``configs`` that has it."""
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
                    raise DataError(f"{place}_id {id!r} is not one of the {self.vocab_size} tokens of {self.path}")
                return id
        return None

    def _given_ends(self, configs: Mapping[str, Mapping[str, Any]]) -> list[int]:
        """The eos_token_id, one or several, of the first of the last ``configs`` that has one."""
        given = {name: configs.get(name, {}).get("eos_token_id") for name in CONFIG_FILES[2:]}
        for name, value in given.items():
            ends: list[Any] = value if isinstance(value, list) else [value]
            if value in (None, []):
                continue
            if not all(type(id) is int for id in ends):
                place = os.path.join(os.path.dirname(self.path), name)
                raise DataError(
                    f"{place}: eos_token_id is {shown(value)}, and should be the number of a token, or a list of such "
                    "numbers"
                )
            return ends
        return []

    def _id(self, place: str, token: Any) -> int:
        if not isinstance(token, str) or token not in self.pieces:
            raise DataError(f"{place} is not in the vocabulary of {self.path}: choose one of its tokens")
        return self.pieces[token]


def _check_pieces(path: str, encoder: tokenizers.Tokenizer, pieces: Mapping[str, int]) -> None:
    """Raises DataError for two words with one id, and for a token that is too long; added tokens may replace words."""
    if len(longest := max(pieces, key=len, default="")) > LONGEST_TOKEN:
        raise DataError(f"{path}: a token has {len(longest):,} characters, more than {LONGEST_TOKEN:,}")
    if len({*pieces.values()}) < len(pieces):
        words: dict[int, str] = {}
        for word, id in encoder.get_vocab(with_added_tokens=False).items():
            if (other := words.setdefault(id, word)) != word:
                raise DataError(f"{path}: {shown(other)} and {shown(word)} have the id {id}: give each its own")


def _normalized_tokens(path: str, encoder: tokenizers.Tokenizer) -> list[str]:
    """The added tokens that are read in normalized texts; others are special, and no word of the model."""
    added = encoder.get_added_tokens_decoder()
    words: set[int] = set()
    with suppress(DataError), library_errors(path):  # an error of these texts, not of the tokenizer
        encodings = encoder.encode_batch([token.content for token in added.values()], add_special_tokens=False)
        words = {id for id, encoding in zip(added, encodings, strict=True) if id in encoding.ids}
    return [token.content for id, token in added.items() if token.normalized or (token.special and id in words)]


def checked_size(path: str, tokens: int, rows: int | None) -> int:
    """``rows``, or ``tokens`` if ``rows`` is None. Raises DataError if there are fewer rows than tokens."""
    if rows is not None and rows < tokens:
        raise DataError(
            f"{path} has {tokens} tokens, and the embedding of the model {rows} rows (--vocab-size): use "
            f"the tokenizer of the model, or {tokens} rows or more"
        )
    return tokens if rows is None else rows


def _read_configs(folder: str) -> dict[str, dict[str, Any]]:
    """The content of each of ``CONFIG_FILES`` in ``folder``, by name. Raises DataError for one that is broken."""
    paths = {name: os.path.join(folder, name) for name in CONFIG_FILES}
    return {name: read_object(path) for name, path in paths.items() if os.path.lexists(path)}


def read_encoder(path: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, with the tokens that its tokenizer_config.json adds. Raises DataError."""
    text = read_text(path)

    def make() -> tokenizers.Tokenizer:
        encoder = tokenizers.Tokenizer.from_str(text)
        encoder.no_padding()
        encoder.no_truncation()
        return encoder

    def try_out() -> None:
        try:
            parse_json(text)  # the library takes the last one of a repeated key
        except json.JSONDecodeError as error:
            raise ValueError(f"{error}; is the file complete?") from None
        check_growth(encoder := make())
        with suppress(DataError), library_errors(path):  # an error of this text, not of the tokenizer
            encoder.encode("a")

    # A broken file may make the library panic or abort the process: try it in a child process first.
    if failure := failure_in_child(try_out, seconds=_SECONDS, most_bytes=_MEMORY):
        version = tokenizers.__version__
        raise DataError(f"{path}: not a tokenizer.json that tokenizers {version} reads ({failure}); use another one")
    encoder = make()
    added = config.get("added_tokens_decoder") or {}
    try:
        missing = [
            (int(id), token) for id, token in added.items() if encoder.token_to_id(str(token["content"])) is None
        ]
        missing.sort(key=lambda pair: pair[0])
        tokens = [{name: token[name] for name in _ADDED if name in token} for _, token in missing]
        encoder.add_tokens([tokenizers.AddedToken(**token) for token in tokens])
        for id, token in missing:
            if encoder.token_to_id(token["content"]) != id:
                raise ValueError(f"{token['content']!r} cannot have the id {id}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        config_path = os.path.join(os.path.dirname(path), "tokenizer_config.json")
        raise DataError(f"{config_path}: its added_tokens_decoder does not fit {path} ({error})") from None
    return encoder


_SECONDS, _MEMORY = 30.0, 4 << 30
_MOST_TOKENS = 1 << 24
_ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Arguments of ``tokenizers.AddedToken``."""


class GPTSentencePieceTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece model, a file such as tokenizer.model. Needs the package ``sentencepiece``.

    ``tokenize`` adds no special token, and SentencePiece does not look for control tokens in texts. ``detokenize``
    drops control tokens, such as the end of a document. ``eod`` is the model's end of a sentence, usually ``</s>``, or
    ``eod_token``; ``special_tokens`` are the control tokens.
    """

    tokens: int

    def __init__(self, vocab_file: str | None, *, vocab_size: int | None = None, eod_token: str | None = None) -> None:
        """Raises DataError if the file is absent or broken, no token ends a document, or ``vocab_size`` is too small;
        ConfigError without the package.
        """
        path = require_files("GPTSentencePieceTokenizer", {"--tokenizer-model": vocab_file}, "")[0]
        self._model = _read_model(path)
        pieces = self._model.get_piece_size()
        self.vocab_size = checked_size(path, pieces, vocab_size)
        self.tokens = pieces
        self.bos = None if self._model.bos_id() < 0 else self._model.bos_id()
        with suppress(DataError):  # it is not needed to read the model
            settings = _read_configs(os.path.dirname(path)).get(CONFIG_FILES[0], {})
            self.adds_bos = settings.get("add_bos_token") is True
        self.special_tokens = {self._model.id_to_piece(id): id for id in range(pieces) if self._model.is_control(id)}
        self.eod = self._model.eos_id()
        if eod_token is not None:
            self.eod = self._model.piece_to_id(eod_token)
            if self._model.id_to_piece(self.eod) != eod_token:
                raise DataError(f"--eod-token {eod_token} is not in the vocabulary of {path}: choose one of its tokens")
        if self.eod < 0:
            raise DataError(f"{path}: it has no end of a sentence: choose a token that ends documents with --eod-token")

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), add_bos=False, add_eos=False)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode([id for id in ids if id < self.tokens])


def _read_model(path: str) -> Any:
    """The processor of a model. Raises DataError if the file cannot be read, ConfigError without the package."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise ConfigError(f"{path} is read by the package sentencepiece: pip install sentencepiece") from None
    content = read_file(path)
    try:
        if not content:
            raise RuntimeError("empty")
        return SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise DataError(
            f"{path}: not a SentencePiece model; is the file complete? (Llama 3 is read from its tokenizer.json)"
        ) from None
