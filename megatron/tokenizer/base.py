"""What tokenizers have in common that the Rust library ``tokenizers`` runs."""

from collections.abc import Iterable, Sequence

import tokenizers

from megatron.config.errors import DataError
from megatron.tokenizer.vocabulary import check_known


class RustTokenizer:
    """Texts to ids and back.

    Args:
        encoder: has no special tokens, or they would be found in texts.
        vocab_size: ids are below it.
    """

    def __init__(self, encoder: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._encoder, self.vocab_size = encoder, vocab_size

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``. Raises DataError for a text that UTF-8 cannot write."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Raises DataError for a text that UTF-8 cannot write."""
        try:
            return self._ids(texts)
        except TypeError:
            check_encodable(texts)
            raise

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as the library makes them, by all cores."""
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8, as of half a character, become U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        ids = [int(id) for id in ids]
        check_known(ids, self.vocab_size)
        return self._encoder.decode(ids, skip_special_tokens=False)


def check_encodable(texts: Iterable[str]) -> None:
    """Raises DataError for a text with half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise DataError(
                f"character {error.start} of the text is U+{code:04X}, half of a surrogate pair; remove or replace it"
            ) from error
