"""Samples for T5: a text with some spans taken out, and those spans (arXiv 1910.10683, section 3.1.4).

    encoder   thank <s0> me to your party <s1> week
    decoder   [BOS] <s0> you for inviting <s1> last
    labels    <s0> you for inviting <s1> last [EOS]

The sentences of a sample and the order of samples are those of ``megatron.data.sentence_dataset``, with runs of one
sentence or more. Which spans are taken out of a run follows from the seed and the number of the sample alone; the draws
are those of megatron-core's ``T5MaskedWordPieceDataset``.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.data import SPLITS, target_prefix
from megatron.data.indexed_dataset import IndexedDataset, check_tokens
from megatron.data.sentence_dataset import Run, SentenceDataset
from megatron.data.splits import SPLIT_NAMES, Source, SourceSamples, advice, seed_words, words_of
from megatron.tokenizer import SpanVocabulary, span_vocabulary

FRAME = 2
"""Tokens of a sample that are kept free, for the beginning and the end of the text."""
LONGEST_SPAN, STOP = 10, 0.2
"""Words of a span at most, and the probability that a span ends after a word."""


class T5Dataset(SentenceDataset):
    """Samples of texts with spans taken out, int64 [encoder + 2 x decoder]: see ``framed``."""

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        """Raises DataError as ``span_vocabulary``."""
        super().__init__(data, name, source, samples, max_tokens=data.seq_length - FRAME, fewest=1, seed=seed)
        self._data, self._seed, self._vocabulary = data, seed, span_vocabulary(data)
        assert self._vocabulary.size == vocab_size

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """An error message for a source that does not hold a single sample of the split ``name``, else None."""
        _, indexed, documents = source
        if np.diff(indexed.doc_idx[documents.start : documents.stop + 1]).any():
            return None
        return (
            f"{words_of(data, name, source)} ({len(documents)} of {indexed.num_documents} documents) holds no "
            f"sentence: {advice(data, name, source)}"
        )

    def _sample(self, run: Run, index: int) -> np.ndarray:
        tokens = self._tokens(run, self._vocabulary.text_tokens)
        random = np.random.RandomState((self._seed + index) % 2**32)
        try:
            return corrupted(tokens[: run.target], run.target, self._vocabulary, self._data, random)
        except ValueError as error:
            raise DataError(f"sample {index} of {self.indexed.prefix}: {error}") from None

    def _parts(self, run: Run, index: int) -> Sequence[range]:
        return [range(min(int(self.indexed.sizes[run.first : run.end].sum()), run.target))]


def corrupted(
    tokens: np.ndarray, target: int, vocabulary: SpanVocabulary, data: DataConfig, random: np.random.RandomState
) -> np.ndarray:
    """A sample of ``tokens``, of which there could be ``target``, with spans taken out at random; see ``framed``."""
    return framed(tokens, chosen_spans(tokens, target, vocabulary, data.mask_prob, random), vocabulary, data)


def framed(tokens: np.ndarray, spans: Sequence[range], vocabulary: SpanVocabulary, data: DataConfig) -> np.ndarray:
    """What encoder and decoder read, and what the decoder is to predict, one after the other, int64.

    Each of the ``spans`` of ``tokens`` is in the first a sentinel, and in the others its tokens after that sentinel.
    Raises ValueError if there are too few sentinels or too few tokens of the decoder.
    """
    if len(spans) > len(vocabulary.sentinels):
        raise ValueError(
            f"{len(spans)} spans are more than the {len(vocabulary.sentinels)} sentinels: raise --vocab-extra-ids, or "
            "lower --mask-prob"
        )
    sentinels = [int(sentinel) for sentinel in vocabulary.sentinels[: len(spans)]]
    predicted = [token for mark, span in zip(sentinels, spans, strict=True) for token in (mark, *tokens[span])]
    if len(predicted) >= data.decoder_seq_length:
        raise ValueError(
            f"the spans have {len(predicted) + 1} tokens, more than --decoder-seq-length {data.decoder_seq_length}: "
            "raise it, or lower --mask-prob"
        )
    text: list[int] = []
    end = 0
    for mark, span in zip(sentinels, spans, strict=True):
        text += [*tokens[end : span.start], mark]
        end = span.stop
    text += tokens[end:].tolist()
    return padded(text, predicted, vocabulary, data)


def padded(text: Sequence[int], predicted: Sequence[int], vocabulary: SpanVocabulary, data: DataConfig) -> np.ndarray:
    """A sample of the ``text`` of the encoder, and the tokens that the decoder is to predict before the end.

    What the encoder reads, what the decoder reads, and its labels, int64 [encoder + 2 x decoder]. Padding is -1, and 0
    for the decoder.
    """
    sample = np.full(data.seq_length + 2 * data.decoder_seq_length, -1, np.int64)
    encoder, decoder, labels = np.split(sample, [data.seq_length, data.seq_length + data.decoder_seq_length])
    encoder[: len(text)] = text
    decoder[:] = 0
    decoder[: len(predicted) + 1] = [vocabulary.bos, *predicted]
    labels[: len(predicted) + 1] = [*predicted, vocabulary.eos]
    return sample


def chosen_spans(
    tokens: np.ndarray, target: int, vocabulary: SpanVocabulary, mask_prob: float, random: np.random.RandomState
) -> list[range]:
    """Spans of whole words of ``tokens``, in order: a share of ``mask_prob`` of all tokens, or a little less.

    From words in random order on, each with a geometric number of words, shortened to what is still allowed; a span
    that meets an earlier one is left out.
    """
    most = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
    words = _words(tokens, vocabulary)
    taken, count, spans = np.zeros(len(tokens), bool), 0, []
    for first in _shuffled(len(words), random):
        if count >= most:
            break
        number = min(random.geometric(STOP), LONGEST_SPAN)
        while number and count + len(span := _run(words, first, number)) > most:
            number -= 1
        if not number or any(taken[list(span)]):
            continue
        taken[list(span)] = True
        count += len(span)
        spans.append(span)
    return [range(span[0], span[-1] + 1) for span in sorted(spans, key=lambda span: span[0])]


def _words(tokens: np.ndarray, vocabulary: SpanVocabulary) -> list[list[int]]:
    """The positions of each word; none for special tokens of the text."""
    words: list[list[int]] = []
    for position, token in enumerate(tokens.tolist()):
        if token in vocabulary.separators:
            continue
        if words and vocabulary.continues[token]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def _run(words: Sequence[Sequence[int]], first: int, number: int) -> list[int]:
    return [position for word in words[first : first + number] for position in word]


def _shuffled(count: int, random: np.random.RandomState) -> list[int]:
    order = list(range(count))
    random.shuffle(order)
    return order


class PairDataset(SourceSamples):
    """Samples for fine-tuning: texts, and what the decoder is to write for each, int64 [encoder + 2 x decoder].

    The text of PREFIX_input_document and its target are documents of the same number in PREFIX_input_document and
    PREFIX_target_document, as ``tools/preprocess_data.py --json-keys input target`` writes them. Each ends with the end
    of the vocabulary; what is longer than the model reads is cut before it. Each epoch is shuffled by itself.
    """

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        """Raises DataError as ``span_vocabulary``."""
        super().__init__(source, samples)
        self._targets = IndexedDataset(target_prefix(source.indexed.prefix))
        self._data, self._vocabulary = data, span_vocabulary(data)
        assert self._vocabulary.size == vocab_size
        words = [*seed_words(seed), SPLITS.index(name)]
        count = len(source.documents)
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.RandomState([*words, epoch]).permutation(count))

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """Why the data sets of ``source`` are no texts with targets of the split ``name``; None if they are."""
        _, indexed, documents = source
        if target_prefix(indexed.prefix) == indexed.prefix:
            return (
                f"--sft: {indexed.prefix} is not named as texts with targets are: make it with "
                "tools/preprocess_data.py --json-keys input target, and name PREFIX_input_document"
            )
        targets = IndexedDataset(target_prefix(indexed.prefix))
        if targets.num_documents != indexed.num_documents:
            return (
                f"{indexed.prefix} has {indexed.num_documents} documents, and {targets.prefix} "
                f"{targets.num_documents}: make both again, from lines that have an input and a target"
            )
        if len(documents):
            return None
        return f"the {SPLIT_NAMES[name]} split of {indexed.prefix} holds no document: {advice(data, name, source)}"

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        return np.stack([self._sample(*divmod(index, len(self.documents))) for index in indices])

    def _sample(self, epoch: int, at: int) -> np.ndarray:
        document = self.documents[int(self._order(epoch)[at])]
        text = self._tokens(self.indexed, document)[: self._data.seq_length - 1]
        predicted = self._tokens(self._targets, document)[: self._data.decoder_seq_length - 1]
        return padded([*text, self._vocabulary.eos], predicted.tolist(), self._vocabulary, self._data)

    def _tokens(self, indexed: IndexedDataset, document: int) -> np.ndarray:
        first, end = indexed.doc_idx[document : document + 2]
        return check_tokens(indexed, indexed.run(first, end), f"document {document}", self._vocabulary.size)
