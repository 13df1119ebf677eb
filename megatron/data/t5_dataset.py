"""Samples for T5 by span corruption: texts with spans replaced by sentinels (arXiv 1910.10683, section 3.1.4).

    encoder   thank <s0> me to your party <s1> week
    decoder   [BOS] <s0> you for inviting <s1> last
    labels    <s0> you for inviting <s1> last [EOS]

Samples are runs of one sentence or more, in the order of ``megatron.data.sentence_dataset``. The spans depend only on
the seed and the index of the sample, and are drawn as in megatron-core's ``T5MaskedWordPieceDataset``.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS, target_prefix
from megatron.data.indexed_dataset import IndexedDataset, check_tokens
from megatron.data.sentence_dataset import Run, SentenceDataset, random_runs, words_of
from megatron.data.splits import SPLIT_NAMES, Source, SourceSamples, advice, seed_words
from megatron.tokenizer import SpanVocabulary, span_vocabulary

FRAME = 2
"""Tokens of a sample reserved for the beginning and the end of the text."""
LONGEST_SPAN, STOP = 10, 0.2
"""Maximum number of words in a span, and the probability that a span ends after a word."""


class T5Dataset(SentenceDataset):
    """Samples for T5 by span corruption, int64 [encoder + 2 x decoder]: see ``framed``."""

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        """Raises DataError as ``span_vocabulary``."""
        super().__init__(data, name, source, samples, max_tokens=data.seq_length - FRAME, seed=seed)
        self._data, self._seed, self._vocabulary = data, seed, span_vocabulary(data)
        assert self._vocabulary.size == vocab_size

    @classmethod
    def problem(cls, data: DataConfig, name: str, source: Source) -> str | None:
        """An error message for a source without a sentence in the split ``name``, or too long spans; else None."""
        return super().problem(data, name, source) or span_problem(data)

    def _sample(self, run: Run, index: int) -> np.ndarray:
        tokens = self._tokens(run, self._vocabulary.text_tokens)
        random = np.random.RandomState((self._seed + index) % 2**32)
        return corrupted(tokens[: run.target], run.target, self._vocabulary, self._data, random)

    def _parts(self, run: Run, index: int) -> Sequence[range]:
        return [range(min(int(self.indexed.sizes[run.first : run.end].sum()), run.target))]


def span_problem(data: DataConfig) -> str | None:
    """An error message if the spans of a text as long as the encoder reads cannot fit, else None."""
    tokens = int(data.mask_prob * (data.seq_length - FRAME))
    spans = -(-tokens // LONGEST_SPAN)
    if spans > data.vocab_extra_ids:
        return (
            f"{tokens} tokens in {spans} spans are more than the {data.vocab_extra_ids} sentinels: raise "
            "--vocab-extra-ids, or lower --mask-prob"
        )
    if (length := tokens + spans + 1) > data.decoder_seq_length:
        return (
            f"the spans have {length} tokens, more than --decoder-seq-length {data.decoder_seq_length}: raise it, or "
            "lower --mask-prob"
        )
    return None


def corrupted(
    tokens: np.ndarray, target: int, vocabulary: SpanVocabulary, data: DataConfig, random: np.random.RandomState
) -> np.ndarray:
    """A sample of at most ``target`` ``tokens``, with random spans replaced by sentinels; see ``framed``."""
    room = data.decoder_seq_length - 1  # for the end of the sequence
    return framed(tokens, chosen_spans(tokens, target, vocabulary, data.mask_prob, room, random), vocabulary, data)


def framed(tokens: np.ndarray, spans: Sequence[range], vocabulary: SpanVocabulary, data: DataConfig) -> np.ndarray:
    """Inputs of encoder and decoder, and labels, concatenated, int64 [encoder + 2 x decoder].

    A sentinel replaces each of the ``spans`` in the encoder's input. Decoder input and labels are, for each span, its
    sentinel and its tokens, for which there must be room.
    """
    sentinels = [int(sentinel) for sentinel in vocabulary.sentinels[: len(spans)]]
    predicted = [token for mark, span in zip(sentinels, spans, strict=True) for token in (mark, *tokens[span])]
    text: list[int] = []
    end = 0
    for mark, span in zip(sentinels, spans, strict=True):
        text += [*tokens[end : span.start], mark]
        end = span.stop
    text += tokens[end:].tolist()
    return padded(text, predicted, vocabulary, data)


def padded(text: Sequence[int], predicted: Sequence[int], vocabulary: SpanVocabulary, data: DataConfig) -> np.ndarray:
    """Pad the ``text`` of the encoder and the tokens that the decoder is to predict into a sample.

    Returns inputs of encoder and decoder, and labels, int64 [encoder + 2 x decoder]. Padding is -1, and 0 in the input
    of the decoder.
    """
    sample = np.full(data.seq_length + 2 * data.decoder_seq_length, -1, np.int64)
    encoder, decoder, labels = np.split(sample, [data.seq_length, data.seq_length + data.decoder_seq_length])
    encoder[: len(text)] = text
    decoder[:] = 0
    decoder[: len(predicted) + 1] = [vocabulary.bos, *predicted]
    labels[: len(predicted) + 1] = [*predicted, vocabulary.eos]
    return sample


def chosen_spans(
    tokens: np.ndarray,
    target: int,
    vocabulary: SpanVocabulary,
    mask_prob: float,
    room: int,
    random: np.random.RandomState,
) -> list[range]:
    """Draw spans of complete words, in order, that cover a fraction ``mask_prob`` of all tokens, or a little less.

    Spans start at words in random order, and have a geometrically distributed number of words, shortened to the tokens
    that are left; a span that overlaps an earlier one is dropped. There are at most as many as sentinels, and at most
    ``room`` tokens of spans and sentinels.
    """
    most = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
    runs = random_runs(
        words_of(tokens, vocabulary.separators, vocabulary.continues),
        lambda runs: 0 if runs == len(vocabulary.sentinels) else min(most, room - runs - 1),
        lambda: min(random.geometric(STOP), LONGEST_SPAN),
        random,
    )
    return [range(run[0], run[-1] + 1) for run in runs]


class PairDataset(SourceSamples):
    """Samples for fine-tuning T5: an input text and its target, int64 [encoder + 2 x decoder].

    Input and target are the documents of the same number in PREFIX_input_document and PREFIX_target_document, which
    ``tools/preprocess_data.py --json-keys input target`` writes. Longer texts are cut, and each ends with the
    end-of-sequence token. Each epoch is shuffled separately.
    """

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        """Raises DataError as ``span_vocabulary``."""
        super().__init__(source, samples, -(-samples // len(source.documents)))
        self._targets = IndexedDataset(target_prefix(source.indexed.prefix))
        self._data, self._vocabulary = data, span_vocabulary(data)
        assert self._vocabulary.size == vocab_size
        words = [*seed_words(seed), SPLITS.index(name)]
        count = len(source.documents)
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.RandomState([*words, epoch]).permutation(count))

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """An error message if ``source`` has no inputs with targets for the split ``name``, else None."""
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
