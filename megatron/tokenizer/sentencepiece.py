"""The tokenizers of Llama 2, Mistral and others from their SentencePiece model (Kudo and Richardson, 2018)."""

from collections.abc import Sequence
from typing import Any

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import read_bytes
from megatron.tokenizer.base import ListTokenizer, check_encodable, check_known, check_words, require_files
from megatron.tokenizer.huggingface import checked_size


class GPTSentencePieceTokenizer(ListTokenizer):
    """A SentencePiece model, a file such as tokenizer.model. Needs the package ``sentencepiece``.

    ``tokenize`` adds no special token, and SentencePiece does not look for control tokens in texts. Control tokens,
    such as the end of a document, have no text.

    Attributes:
        vocab_size: its pieces, or the size that is asked for, if the model has more rows.
        tokens: the same without these rows.
        eod: the model's own end of a sentence, ``</s>`` for most.
        bos: id of the model's own beginning of a sentence; None without one.
        special_tokens: ids of the control tokens by their text.
    """

    unk: int | None = None

    def __init__(
        self,
        vocab_file: str | None,
        merge_file: str | None = None,
        *,
        vocab_size: int | None = None,
        eod_token: str | None = None,
    ) -> None:
        """Read the model ``vocab_file``. There is no file of merges.

        Raises DataError if the file is absent or broken, no token ends a document, or ``vocab_size`` is too small;
        ConfigError without the package.
        """
        path = require_files("GPTSentencePieceTokenizer", {"--tokenizer-model": vocab_file}, "")[0]
        self._model = _read_model(path)
        pieces = self._model.get_piece_size()
        self.vocab_size = checked_size(path, pieces, vocab_size)
        self.tokens = pieces
        self.bos: int | None = None if self._model.bos_id() < 0 else self._model.bos_id()
        self.special_tokens = {self._model.id_to_piece(id): id for id in range(pieces) if self._model.is_control(id)}
        self.eod: int = self._model.eos_id()
        if eod_token is not None:
            self.eod = self._model.piece_to_id(eod_token)
            if self._model.id_to_piece(self.eod) != eod_token:
                raise DataError(f"--eod-token {eod_token} is not in the vocabulary of {path}: choose one of its tokens")
        if self.eod < 0:
            raise DataError(f"{path}: it has no end of a sentence: choose a token that ends documents with --eod-token")

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``. Raises DataError for a text that UTF-8 cannot encode."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Raises DataError as ``tokenize``, and for a word that is too long."""
        for text in texts:
            check_words(text)
            check_encodable(text)
        return self._model.encode(list(texts), add_bos=False, add_eos=False)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; half a character becomes U+FFFD. Raises DataError for an id outside the vocabulary."""
        ids = [int(id) for id in ids]
        check_known(ids, self.vocab_size)
        return self._model.decode([id for id in ids if id < self.tokens])


def _read_model(path: str) -> Any:
    """The processor of a model. Raises DataError if the file cannot be read, ConfigError without the package."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise ConfigError(f"{path} is read by the package sentencepiece: pip install sentencepiece") from None
    try:
        content = read_bytes(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        if not content:
            raise RuntimeError("empty")
        return SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise DataError(
            f"{path}: not a SentencePiece model; is the file whole? (Llama 3 is read from its tokenizer.json)"
        ) from None
