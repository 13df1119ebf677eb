"""Samples of pairs of sentences: whole, repeatable, in proportion, and each sentence once an epoch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data.conftest import SAMPLES, TEXT_TOKENS, built

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.data.bert_dataset import BertDataset, mask_tokens
from megatron.data.datasets import check_data
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sentence_dataset import SentenceStream
from megatron.tokenizer.words import WordPieceTokenizer

PAD, UNK, CLS, SEP, MASK = range(5)
LENGTHS = [1, 2, 7, 3, 1, 12, 2, 5] * 5
"""Sentences of each document."""


@pytest.fixture
def vocab_file(sentences: Path) -> Path:
    return sentences / "vocab.txt"


@pytest.fixture
def prefix(sentences: Path) -> str:
    return str(sentences / "text_sentence")


@pytest.fixture
def build(prefix: str, vocab_file: Path, tmp_path: Path):
    """The training data set with some settings changed, for that many samples."""

    def datasets(samples: int = 200, seed: int = 7, **changes) -> BertDataset:
        settings = {"data_path": (prefix,), "seq_length": 40, "split": "1,0,0", "data_cache_path": str(tmp_path)}
        kind = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(vocab_file)}
        data = DataConfig(**kind, **settings | changes)
        return built(data, {"train": samples}, vocab_size=TEXT_TOKENS, seed=seed, masked_lm=True).train

    return datasets


def original(sample: np.ndarray) -> tuple[list[int], list[int]]:
    """Both runs of a sample as they were before any word was hidden; in the order of the text."""
    tokens, segments, labels = sample
    whole = np.where(labels >= 0, labels, tokens)
    first, second = (whole[segments == n] for n in (0, 1))
    assert tokens[0] == CLS and first[-1] == second[-1] == SEP
    a, b = first[1:-1].tolist(), second[:-1].tolist()
    return (b, a) if labels[0] else (a, b)


@pytest.mark.parametrize(("seq_length", "short_seq_prob"), [(40, 0.1), (1000, 0.0)])
def test_samples_are_framed_padded_and_full_of_sentences(build, prefix: str, seq_length: int, short_seq_prob: float):
    """A pair that fits is one piece of the text."""
    indexed = IndexedDataset(prefix)
    text = ",".join(map(str, indexed.span(0, indexed.num_tokens)))
    dataset = build(mask_prob=0.2, seq_length=seq_length, short_seq_prob=short_seq_prob)
    for n in range(len(dataset)):
        sample = dataset[n]
        tokens, segments, labels = sample
        assert sample.shape == (3, seq_length) and sample.dtype == np.int64
        end = int((segments >= 0).sum())
        assert segments[:end].tolist() == sorted(segments[:end]) and set(segments[:end]) == {0, 1}
        assert (tokens[end:] == PAD).all() and (labels[end:] == -1).all() and (segments[end:] == -1).all()
        assert labels[0] in (0, 1) and labels[end - 1] == -1 and tokens[end - 1] == SEP
        spans = [span.tokens().tolist() for span in dataset.spans(n)]
        assert original(sample) == tuple(reversed(spans) if labels[0] else spans)
        first, second = original(sample)
        assert first and second
        for run in (first, second) if seq_length == 40 else (first + second,):
            assert ",".join(map(str, run)) in text


def test_a_sample_depends_on_seed_and_number_alone(build):
    some, more = build(50), build(400)
    for n in (31, 0, 49, 31):
        assert np.array_equal(some[n], more[n])
    assert any(not np.array_equal(some[n], build(50, seed=8)[n]) for n in range(5))
    again = len(more.runs) + more.order(1).tolist().index(more.order(0)[0])
    assert not np.array_equal(more[0], more[again]), "the next epoch masks other words"


def test_whole_words_are_masked_in_proportion(vocab_file: Path):
    known = WordPieceTokenizer(str(vocab_file), lower_case=True)
    random = np.random.RandomState(0)
    hidden, fates = 0, np.zeros(3)
    for _ in range(400):
        a, b = random.randint(5, TEXT_TOKENS, (2, 60))
        tokens = np.concatenate([[CLS], a, [SEP], b, [SEP]])
        shown, labels = mask_tokens(tokens, known, 0.15, random)
        places = labels >= 0
        assert np.array_equal(labels[places], tokens[places]) and np.array_equal(shown[~places], tokens[~places])
        assert places.sum() <= round(len(tokens) * 0.15)
        goes_on = known.continues[tokens] & ~np.isin(np.roll(tokens, 1), (CLS, SEP))
        assert (places[goes_on] == np.roll(places, 1)[goes_on]).all(), "all pieces of a word, or none"
        hidden += int(places.sum())
        masked, kept = shown[places] == MASK, shown[places] == tokens[places]
        fates += [masked.sum(), kept.sum(), (~masked & ~kept).sum()]
    assert hidden / (400 * 123) == pytest.approx(0.15, abs=0.01)
    assert fates / hidden == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_masked_words_are_runs_of_one_to_three(vocab_file: Path):
    """Runs of 1, 2 and 3 words have shares of 6, 3 and 2 in 11, and are cut to what is left: here of three tokens."""
    known, random = WordPieceTokenizer(str(vocab_file), lower_case=True), np.random.RandomState(0)
    words = np.flatnonzero(~known.continues[:TEXT_TOKENS])[5:]
    runs = np.zeros(4)
    for _ in range(1000):
        tokens = np.concatenate([[CLS], random.choice(words, 1000), [SEP]])
        places = mask_tokens(tokens, known, 0.003, random)[1] >= 0
        assert places.sum() == 3
        runs[np.count_nonzero(np.diff(places.astype(int)) == 1)] += 1
    assert runs / 1000 == pytest.approx([0, 2 / 11, 63 / 121, 36 / 121], abs=0.03)


@pytest.mark.parametrize("change", [lambda runs: runs * [1, 1, 0], lambda runs: runs[1:]], ids=["target", "fewer"])
def test_other_stored_runs_are_built_again(build, tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]):
    expected = build().runs
    (file,) = tmp_path.glob("*_runs.npy")
    np.save(file, change(expected))
    assert np.array_equal(build().runs, expected)


def test_half_of_the_pairs_are_swapped(build):
    dataset = build(600)
    assert np.mean([dataset[n][2, 0] for n in range(600)]) == pytest.approx(0.5, abs=0.07)


@pytest.mark.parametrize("short_seq_prob", [0.0, 0.4])
def test_every_sentence_is_in_one_pair_of_each_epoch(short_seq_prob: float):
    sizes = np.random.RandomState(1).randint(1, 30, sum(LENGTHS)).astype(np.int32)
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    stream = SentenceStream(sizes, bounds, max_tokens=40, short_seq_prob=short_seq_prob, seed=5)
    runs = stream.runs()
    covered = [n for first, end, _ in runs for n in range(first, end)]
    with_company = [n for d, length in enumerate(LENGTHS) if length > 1 for n in range(bounds[d], bounds[d + 1])]
    assert covered == with_company
    documents = np.searchsorted(bounds, runs[:, 0], side="right")
    assert (runs[:, 1] <= bounds[documents]).all() and (runs[:, 1] - runs[:, 0] >= 2).all()
    for epoch in range(3):
        assert sorted(stream.order(len(runs), epoch)) == list(range(len(runs)))


def test_a_blend_has_pairs_of_each_data_set(build, prefix, tmp_path):
    other = tmp_path / "other"
    for end in (".bin", ".idx"):
        other.with_suffix(end).write_bytes(Path(f"{prefix}{end}").read_bytes())
    blend, alone = build(40, data_path=("3", prefix, "1", str(other))), build(30)
    samples = [sample.tobytes() for sample in (blend[n] for n in range(40))]
    assert [samples.count(alone[n].tobytes()) for n in range(30)] == [2] * 10 + [1] * 20


def test_documents_of_one_sentence_make_no_pairs(write_dataset):
    prefix = write_dataset([[5, 6, 7]] * 20)
    data = DataConfig(data_path=(prefix,), seq_length=16, split="8,1,1")
    with pytest.raises(DataError) as caught:
        check_data(data, SAMPLES, masked_lm=True)
    assert len(caught.value.messages) == 2, "of the splits for training and validation"
    assert "the training split of" in caught.value.messages[0] and "--split-sentences" in caught.value.messages[0]


def test_a_token_outside_the_vocabulary_is_named(prefix, vocab_file, tmp_path):
    short = tmp_path / "vocab.txt"
    short.write_text("".join(vocab_file.read_text().splitlines(keepends=True)[:50]))
    data = DataConfig(
        data_path=(prefix,), vocab_file=str(short), tokenizer_type="BertWordPieceLowerCase", seq_length=40,
        split="1,0,0", data_cache_path=str(tmp_path),
    )  # fmt: skip
    dataset = built(data, {"train": 9}, vocab_size=50, masked_lm=True).train
    with pytest.raises(DataError, match=r"holds token \d+ in sentences \d+ to \d+ at offset \d+, .* ends at 49"):
        [dataset[n] for n in range(9)]
