"""Samples for T5: texts with spans taken out, which put back in give the text again."""

from pathlib import Path

import numpy as np
import pytest
from data.conftest import TEXT_TOKENS, WORDS, built

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.t5_dataset import T5Dataset
from megatron.tokenizer import span_vocabulary

SENTINELS = 12
VOCAB_SIZE = TEXT_TOKENS + 2 + SENTINELS
BOS, EOS, FIRST = TEXT_TOKENS, TEXT_TOKENS + 1, TEXT_TOKENS + 2


@pytest.fixture
def settings(sentences: Path, tmp_path: Path) -> dict:
    return {
        "data_path": (str(sentences / "text_sentence"),), "seq_length": 40, "decoder_seq_length": 20, "split": "1,0,0",
        "data_cache_path": str(tmp_path), "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": str(sentences / "vocab.txt"), "vocab_extra_ids": SENTINELS,
    }  # fmt: skip


def build(settings: dict, samples: int = 60, seed: int = 7, **changes) -> T5Dataset:
    data = DataConfig(**settings | changes)
    return built(data, {"train": samples}, vocab_size=VOCAB_SIZE, seed=seed, masked_lm=True).train


def parts(sample: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """What the encoder reads, without padding; the decoder; and the labels."""
    encoder, decoder, labels = np.split(sample, [40, 60])
    length = int((labels >= 0).sum())
    assert (labels[length:] == -1).all() and not decoder[length:].any()
    return encoder[encoder >= 0].tolist(), decoder[:length].tolist(), labels[:length].tolist()


def put_back(encoder: list[int], labels: list[int]) -> list[int]:
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token >= FIRST:
            spans[token] = []
        else:
            spans[max(spans)].append(token)
    assert list(spans) == list(range(FIRST, FIRST + len(spans))) and all(spans.values())
    return [token for mark in encoder for token in spans.get(mark, [mark])]


def test_samples_with_their_spans_are_the_text(settings):
    indexed, dataset = IndexedDataset(settings["data_path"][0]), build(settings)
    text = ",".join(map(str, indexed.span(0, indexed.num_tokens)))
    masked = whole = 0
    for n in range(len(dataset)):
        encoder, decoder, labels = parts(dataset[n])
        assert decoder == [BOS, *labels[:-1]] and labels[-1] == EOS
        original = put_back(encoder, labels)
        (span,) = dataset.spans(n)
        assert span.tokens().tolist() == original
        assert len(original) <= 38 and f",{','.join(map(str, original))}," in f",{text},"
        begins = [labels[at + 1] for at, token in enumerate(labels[:-1]) if token >= FIRST]
        assert all(token < 5 + WORDS for token in begins if token != original[0]), "spans begin with words"
        whole += len(original)
        masked += sum(token < TEXT_TOKENS for token in labels)
    assert 0.11 < masked / whole < 0.16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mask_prob": 0.6, "decoder_seq_length": 60, "vocab_extra_ids": 1},
            "spans are more than the 1 sentinels: raise",
        ),
        ({"decoder_seq_length": 4}, "more than --decoder-seq-length 4: raise it, or lower --mask-prob"),
        (
            {"mock_data": True, "data_path": (), "mask_prob": 0.9, "decoder_seq_length": 4},
            "more than --decoder-seq-length 4: raise it, or lower --mask-prob",
        ),
        ({"vocab_file": None}, "--vocab-file is missing"),
    ],
)
def test_what_does_not_fit_is_an_error_of_one_line(settings, changes, message):
    with pytest.raises(DataError, match=message) as caught:
        data = DataConfig(**settings | changes)
        size = span_vocabulary(data).size
        built(data, {"train": 60}, vocab_size=size, masked_lm=True).train.take(range(60))
    assert len(caught.value.messages) == 1


@pytest.mark.parametrize(("changes", "most"), [({"decoder_seq_length": 8}, 7), ({"vocab_extra_ids": 1}, 1)])
def test_spans_that_do_not_fit_are_left_out(settings, changes, most):
    data = DataConfig(**settings | changes)
    whole, size = build(settings), span_vocabulary(data).size
    dataset = built(data, {"train": 60}, vocab_size=size, seed=7, masked_lm=True).train
    length, shorter = 40 + dataset[0][40:].size // 2, 0
    for n in range(len(dataset)):
        encoder, decoder, labels = (part.tolist() for part in np.split(dataset[n], [40, length]))
        labels = [token for token in labels if token >= 0]
        sentinels = [token for token in labels if token >= BOS + 2]
        assert len(labels) <= len(decoder) and min(len(labels) - 1, len(sentinels)) <= most
        (span,) = dataset.spans(n)
        assert put_back([token for token in encoder if token >= 0], labels) == span.tokens().tolist()
        shorter += len(labels) < len(parts(whole[n])[2])
    assert 0 < shorter


def test_mock_samples_have_the_same_form(settings):
    data = DataConfig(
        mock_data=True, tokenizer_type="NullTokenizer", vocab_size=200, vocab_extra_ids=20, seq_length=40,
        decoder_seq_length=20,
    )  # fmt: skip
    sample = built(data, {"train": 3}, masked_lm=True).train.take([0])[0]
    encoder, decoder, labels = np.split(sample, [40, 60])
    assert sample.shape == (80,) and decoder[0] == 197 and (labels == 199).sum() == 1
    assert (encoder[encoder >= 0] < 196).all() and (encoder == 176).sum() == 1
