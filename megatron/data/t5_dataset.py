"""Samples for T5: a text with some spans taken out, and those spans (arXiv 1910.10683, section 3.1.4).

    encoder   thank <s0> me to your party <s1> week
    decoder   [BOS] <s0> you for inviting <s1> last
    labels    <s0> you for inviting <s1> last [EOS]

The sentences of a sample and the order of samples are those of ``megatron.data.sentence_dataset``, with runs of one
sentence or more. Which spans are taken out of a run follows from the seed and the number of the sample alone; the draws
are those of megatron-core's ``T5MaskedWordPieceDataset``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.data.sentence_dataset import Run, SentenceDataset, read_sentences, sentence_maps
from megatron.data.splits import SPLIT_NAMES, Source
from megatron.tokenizer import SpanVocabulary, span_vocabulary

FRAME = 2
"""Tokens of a sample that are kept free, for the beginning and the end of the text."""
LONGEST_SPAN, STOP = 10, 0.2
"""Words of a span at most, and the probability that a span ends after a word."""


@dataclass(frozen=True)
class Shape:
    """The lengths of a sample, and the share of its tokens that is taken out."""

    encoder: int
    decoder: int
    mask_prob: float

    @classmethod
    def of(cls, data: DataConfig) -> "Shape":
        """Those of a run."""
        return cls(data.seq_length, data.decoder_seq_length, data.mask_prob)


class T5Dataset(SentenceDataset):
    """Samples of some documents of a data set of sentences, in the order of training.

    Args:
        source: the data set, whose sequences are sentences, and its documents.
        runs: which sentences make up which sample.
        order: returns the order of the runs in an epoch.
        samples: samples that are needed.
        vocabulary: the special tokens, and which tokens continue a word.
        shape: lengths of the samples.
        seed: seed of the spans.
    """

    def __init__(
        self,
        source: Source,
        runs: np.ndarray,
        order: Callable[[int], np.ndarray],
        samples: int,
        *,
        vocabulary: SpanVocabulary,
        shape: Shape,
        seed: int,
    ) -> None:
        super().__init__(source, runs, order, samples)
        self._vocabulary, self._shape, self._seed = vocabulary, shape, seed

    def __getitem__(self, index: int) -> np.ndarray:
        """The ``index``-th sample to train on, int64 [encoder + 2 x decoder]: see ``framed``.

        Raises DataError if a token is not in the vocabulary, or the sample does not fit into the decoder.
        """
        run = self._run(index)
        tokens = read_sentences(self.indexed, run, self._vocabulary.text_tokens)
        random = np.random.RandomState((self._seed + index) % 2**32)
        try:
            return corrupted(tokens[: run.target], run.target, self._vocabulary, self._shape, random)
        except ValueError as error:
            raise DataError(f"sample {index} of {self.indexed.prefix}: {error}") from None

    def _parts(self, run: Run, index: int) -> Sequence[range]:
        return [range(min(int(self.indexed.sizes[run.first : run.end].sum()), run.target))]


def corrupted(
    tokens: np.ndarray, target: int, vocabulary: SpanVocabulary, shape: Shape, random: np.random.RandomState
) -> np.ndarray:
    """A sample of ``tokens``, of which there could be ``target``, with spans taken out at random; see ``framed``."""
    return framed(tokens, chosen_spans(tokens, target, vocabulary, shape.mask_prob, random), vocabulary, shape)


def framed(tokens: np.ndarray, spans: Sequence[range], vocabulary: SpanVocabulary, shape: Shape) -> np.ndarray:
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
    if len(predicted) >= shape.decoder:
        raise ValueError(
            f"the spans have {len(predicted) + 1} tokens, more than --decoder-seq-length {shape.decoder}: raise it, or "
            "lower --mask-prob"
        )
    text: list[int] = []
    end = 0
    for mark, span in zip(sentinels, spans, strict=True):
        text += [*tokens[end : span.start], mark]
        end = span.stop
    text += tokens[end:].tolist()
    return padded(text, predicted, vocabulary, shape)


def padded(text: Sequence[int], predicted: Sequence[int], vocabulary: SpanVocabulary, shape: Shape) -> np.ndarray:
    """A sample of the ``text`` of the encoder, and the tokens that the decoder is to predict before the end.

    What the encoder reads, what the decoder reads, and its labels, int64 [encoder + 2 x decoder]. Padding is -1, and 0
    for the decoder.
    """
    sample = np.full(shape.encoder + 2 * shape.decoder, -1, np.int64)
    encoder, decoder, labels = np.split(sample, [shape.encoder, shape.encoder + shape.decoder])
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


def t5_error(data: DataConfig, name: str, source: Source) -> str | None:
    """An error message for a source that does not hold a single sample of the split ``name``, else None."""
    _, indexed, documents = source
    if np.diff(indexed.doc_idx[documents.start : documents.stop + 1]).any():
        return None
    cut, advice = (f' by --split "{data.split}"', " or another --split") if data.is_split else ("", "")
    return (
        f"the {SPLIT_NAMES[name]} split of {indexed.prefix}{cut} ({len(documents)} of {indexed.num_documents} "
        f"documents) holds no sentence: use more text{advice}"
    )


def t5_samples(data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int) -> T5Dataset:
    """At least ``samples`` samples of one source of the split ``name``. Raises DataError as ``span_vocabulary``."""
    vocabulary = span_vocabulary(data)
    assert vocabulary.size == vocab_size
    runs, order = sentence_maps(data, name, source, max_tokens=data.seq_length - FRAME, fewest=1, seed=seed)
    return T5Dataset(source, runs, order, samples, vocabulary=vocabulary, shape=Shape.of(data), seed=seed)
