"""Data and tokenizer settings, and the parser for blends of data sets."""

import os
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

from megatron.common.tokenizer_files import NULL_TOKENIZER, PUBLISHED, TOKENIZER_TYPES
from megatron.config.fields import derived, flag, folder, is_decimal, size


class Part(NamedTuple):
    """A data set of a blend."""

    share: Fraction
    """Its share of the samples; the shares of a blend add up to 1."""
    prefix: str


@lru_cache(maxsize=8)
def read_blend(arguments: tuple[str, ...]) -> tuple[Part, ...]:
    """Parse ``0.3 PREFIX 0.7 PREFIX``, or a single ``PREFIX``; weights are relative, and kept as exact fractions.

    Raises ValueError if the arguments are not a blend.
    """
    if len(arguments) == 1:
        return (Part(Fraction(1), arguments[0]),)
    if len(arguments) % 2:
        raise ValueError(f"{len(arguments)} arguments: give one prefix, or WEIGHT PREFIX for each data set")
    weights = [_read_weight(*pair) for pair in zip(arguments[::2], arguments[1::2], strict=True)]
    prefixes = arguments[1::2]
    counts = Counter(map(os.path.normpath, prefixes))
    if duplicate := next((prefix for prefix in prefixes if counts[os.path.normpath(prefix)] > 1), None):
        raise ValueError(f"{duplicate} is given twice: give it once, with the sum of its weights")
    total = sum(weights)
    return tuple(Part(weight / total, prefix) for weight, prefix in zip(weights, prefixes, strict=True))


def _read_weight(text: str, prefix: str) -> Fraction:
    if not is_decimal(text):
        raise ValueError(f"{text} is not a number: give a weight before {prefix}")
    if not 1e-12 <= float(text) <= 1e18:  # Fraction(text) would accept any exponent, and then take all memory
        raise ValueError(f"{text} before {prefix} must be from 1e-12 to 1e18: remove data sets that are not used")
    return Fraction(text)


SPLITS = ("train", "valid", "test")
"""The splits of the data."""


def loss_mask_prefix(prefix: str) -> str:
    """The prefix of the loss mask of the data set at ``prefix``: which of its tokens count in the loss."""
    return f"{prefix}_loss_mask"


def target_prefix(prefix: str) -> str:
    """The prefix of the targets for the inputs at ``prefix``; ``prefix`` itself if its name has no ``_input_``.

    Preprocessing writes both from the keys ``input`` and ``target`` of the same records.
    """
    head, name, tail = prefix.rpartition("_input_")
    return f"{head}_target_{tail}" if name and "/" not in tail else prefix


MOCK_DATA = "mock data"
"""``data_hash`` of a run on mock data."""
DEFAULT_VOCABULARY = {False: 50257, True: 30522}
"""Vocabulary size by ``masked_lm``: GPT-2's (False) and BERT's (True)."""
_BLEND = "[WEIGHT] PREFIX ..."

_pretraining_flag = partial(flag, models="gpt bert t5")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and tokenizer."""

    data_path: tuple[str, ...] = _pretraining_flag(
        (),
        "Prefix of the data set (PREFIX.bin and PREFIX.idx), or a blend: WEIGHT PREFIX for each data set.",
        metavar=_BLEND,
        instead_of=("mock_data",),
    )
    train_data_path: tuple[str, ...] = _pretraining_flag(
        (),
        "Data or blend for training only; no --split.",
        metavar=_BLEND,
        instead_of=("data_path", "split", "mock_data"),
    )
    valid_data_path: tuple[str, ...] = _pretraining_flag(
        (), "Data set or blend for validation.", metavar=_BLEND, needs="train_data_path"
    )
    test_data_path: tuple[str, ...] = _pretraining_flag(
        (), "Data set or blend for the test.", metavar=_BLEND, needs="train_data_path"
    )
    split: str = _pretraining_flag("969, 30, 1", "Proportions of the documents for training, validation and test.")
    data_cache_path: str | None = folder(
        None, "Folder for index maps (default: next to the data).", models="gpt bert t5"
    )
    mock_data: bool = _pretraining_flag(
        False, "Train on synthetic data, without data and tokenizer files: for speed tests."
    )
    no_shared_disk: bool = _pretraining_flag(
        False, "Hosts share no disk: the first rank of each host builds index maps.", aliases=("no-shared-storage",)
    )
    num_workers: int = _pretraining_flag(2, "Number of data loader processes per rank.", within="[0, 1024]")
    seq_length: int = flag(
        0,
        "Sequence length; T5: of the encoder.",
        aliases=("encoder-seq-length",),
        within="[1, 1073741824]",
        required=True,
    )
    decoder_seq_length: int = flag(
        0, "Sequence length of the decoder in tokens.", within="[1, 1073741824]", models="t5", required=True
    )
    tokenizer_type: str = flag(
        "GPT2BPETokenizer",
        "Type of tokenizer (default: BertWordPieceLowerCase for BERT and T5; else what --tokenizer-model holds, or "
        "GPT2BPETokenizer). NullTokenizer has no files; its text is token ids.",
        choices=(*TOKENIZER_TYPES, NULL_TOKENIZER),
        needs=f"{NULL_TOKENIZER}: vocab_size",
        excludes=tuple(f"{NULL_TOKENIZER}: {file}" for file in ("vocab_file", "merge_file", "tokenizer_model")),
    )
    vocab_file: str | None = flag(
        None,
        "Vocabulary file of the tokenizer: vocab.json, or vocab.txt for WordPiece.",
        aliases=("vocab",),
        metavar="FILE",
        instead_of=("tokenizer_model",),
    )
    vocab_size: int | None = flag(
        None,
        "Tokens of NullTokenizer (default with --mock-data: GPT-2's or BERT's), or rows of a published vocabulary.",
        within="[8, 1073741824]",
        ignored_without={
            f"tokenizer_type={NULL_TOKENIZER}|{'|'.join(PUBLISHED)}": "the others count the tokens of their files"
        },
    )
    merge_file: str | None = flag(
        None, "BPE merges (default: merges.txt near --vocab-file).", metavar="FILE", instead_of=("tokenizer_model",)
    )
    tokenizer_model: str | None = flag(
        None,
        "Folder with the files of the tokenizer, or its tokenizer.json or tokenizer.model.",
        aliases=("tokenizer-name-or-path",),
        metavar="PATH",
    )
    eod_text: str | None = flag(
        None,
        "Token that ends a document, of a published tokenizer (default: its eos_token).",
        name="eod-token",
        metavar="TEXT",
        needs=f"tokenizer_type={'|'.join(PUBLISHED)}",
    )
    reset_position_ids: bool = flag(False, "Reset position ids after each end-of-document token.", models="gpt")
    reset_attention_mask: bool = flag(False, "Restrict attention to tokens of the same document.", models="gpt")
    eod_mask_loss: bool = flag(False, "Mask the loss of end-of-document tokens.", models="gpt")
    sft: bool = flag(
        False,
        "Instruction tuning on data sets with a loss mask (tools/preprocess_data.py --format), in complete documents.",
        models="gpt t5",
        instead_of=("mock_data",),
        excludes={"eod_mask_loss": "the loss mask of the data set decides which tokens count"},
    )
    vocab_extra_ids: int = size(100, "Sentinels in the vocabulary, one for each masked span.", models="t5")
    mask_prob: float = flag(0.15, "Probability of masking a token.", within="(0, 1)", models="bert t5")
    short_seq_prob: float = flag(
        0.1, "Probability of a sample shorter than --seq-length.", within="[0, 1]", models="bert t5"
    )
    image_format: tuple[int, ...] = derived(())
    """``ImageFormat`` of a model that reads images."""
    data_hash: str = derived("")
    """Hash of the content of the data, or ``MOCK_DATA``; empty if no checkpoint is saved or loaded."""
    tokenizer_hash: str = derived("")
    """Hash of the tokenizer's files; empty if no checkpoint is saved or loaded."""
    chat_template: str = derived("")
    """Chat template and special tokens of conversations, as JSON; empty if no checkpoint is saved or loaded."""

    @property
    def extra_ids(self) -> int:
        """Number of sentinels added to the vocabulary; 0 unless the model is encoder-decoder."""
        return self.vocab_extra_ids if self.decoder_seq_length else 0

    @property
    def is_split(self) -> bool:
        """Whether ``split`` divides one blend; otherwise there are three blends."""
        return not self.train_data_path

    @property
    def blends(self) -> dict[str, tuple[Part, ...]]:
        """The blend of each split, empty for a split without data. Raises ValueError if a blend cannot be parsed."""
        if self.is_split:
            return dict.fromkeys(SPLITS, read_blend(self.data_path) if self.data_path else ())
        paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        return {name: read_blend(path) if path else () for name, path in zip(SPLITS, paths, strict=True)}

    @property
    def contents(self) -> tuple[tuple[str, ...], ...]:
        """All prefixes of each provided blend (one that ``split`` divides, or one per split), loss masks included."""
        companion = target_prefix if self.decoder_seq_length else loss_mask_prefix
        files = (lambda prefix: (prefix, companion(prefix))) if self.sft else (lambda prefix: (prefix,))
        return tuple(tuple(name for part in parts for name in files(part.prefix)) for parts in self._provided_blends)

    @property
    def proportions(self) -> str:
        """The shares of the data sets in ``contents``, as text."""
        return "; ".join(" ".join(str(part.share) for part in parts) for parts in self._provided_blends)

    @property
    def _provided_blends(self) -> list[tuple[Part, ...]]:
        blends = list(self.blends.values())
        return blends[:1] if self.is_split else blends

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of all data sets, without repetition."""
        return tuple(dict.fromkeys(part.prefix for parts in self.blends.values() for part in parts))
