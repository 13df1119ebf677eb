"""Data and tokenizer settings, and how a blend of data sets is written."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron.config.fields import derived, flag


class Part(NamedTuple):
    """One data set of a blend."""

    share: Fraction
    """Its share of the samples; those of a blend add up to 1."""
    prefix: str


def read_blend(words: Sequence[str]) -> tuple[Part, ...]:
    """The parts of ``0.3 PREFIX 0.7 PREFIX``, or of a single ``PREFIX``; weights are relative, and taken exactly.

    Raises:
        ValueError: with what is wrong.
    """
    if len(words) == 1:
        return (Part(Fraction(1), words[0]),)
    if len(words) % 2:
        raise ValueError(f"{len(words)} words: give one prefix, or WEIGHT PREFIX for each data set")
    weights = [_read_weight(*pair) for pair in zip(words[::2], words[1::2], strict=True)]
    prefixes = words[1::2]
    places = [os.path.normpath(prefix) for prefix in prefixes]
    if twice := next((prefix for prefix, place in zip(prefixes, places, strict=True) if places.count(place) > 1), None):
        raise ValueError(f"{twice} is there twice: give it once, with the sum of its weights")
    return tuple(Part(weight / sum(weights), prefix) for weight, prefix in zip(weights, prefixes, strict=True))


def _read_weight(text: str, prefix: str) -> Fraction:
    try:
        # A fraction of its own would take any exponent, and then all memory.
        within = 1e-12 <= float(text) <= 1e18
    except ValueError:
        raise ValueError(f"{text} is no number: give a weight before {prefix}") from None
    if not within:
        raise ValueError(f"{text} before {prefix} must be from 1e-12 to 1e18: leave out what is not to be read")
    return Fraction(text)


SPLITS = ("train", "valid", "test")
"""What data are for."""
_BLEND = "[WEIGHT] PREFIX ..."


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and tokenizer."""

    data_path: tuple[str, ...] = flag(
        (),
        "Prefix of the data set, PREFIX.bin and PREFIX.idx, which --split cuts in three; or WEIGHT PREFIX for each of "
        "several, which then have shares of the samples in proportion to their weights.",
        metavar=_BLEND,
    )
    train_data_path: tuple[str, ...] = flag(
        (), "The same for training alone, in place of --data-path and --split.", metavar=_BLEND
    )
    valid_data_path: tuple[str, ...] = flag((), "The same for validation.", metavar=_BLEND)
    test_data_path: tuple[str, ...] = flag((), "The same for the test.", metavar=_BLEND)
    split: str = flag("969, 30, 1", "Documents for training, validation and test, in proportion.")
    data_cache_path: str | None = flag(None, "Folder for index maps (default: beside the data).", metavar="DIR")
    no_shared_disk: bool = flag(
        False, "The first rank of each host builds index maps, on its own disk; otherwise the first of all does."
    )
    data_impl: str = flag("infer", "Format of the data set.", choices=("mmap", "infer"))
    mmap_warmup: bool = flag(False, "Read the data set once at the start, to warm the page cache.")
    num_workers: int = flag(2, "Processes that read samples, on each rank that reads.", within="[0, inf)")
    seq_length: int = flag(0, "Tokens of a sample.", within="[1, inf)", required=True)
    tokenizer_type: str = flag(
        "GPT2BPETokenizer",
        "Kind of tokenizer.",
        choices=("GPT2BPETokenizer", "WhitespaceTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),
    )
    vocab_file: str | None = flag(
        None,
        "Vocabulary of the tokenizer (vocab.json; vocab.txt of WordPiece).",
        aliases=("vocab",),
        required=True,
        metavar="FILE",
    )
    merge_file: str | None = flag(
        None, "Merges of the BPE tokenizer (merges.txt), which requires them.", metavar="FILE"
    )
    reset_position_ids: bool = flag(False, "Count positions anew after each end of document.", masked_lm=False)
    reset_attention_mask: bool = flag(False, "Attend only within a document.", masked_lm=False)
    eod_mask_loss: bool = flag(False, "Leave end-of-document tokens out of the loss.", masked_lm=False)
    mask_prob: float = flag(
        0.15, "Fraction of the tokens that are hidden and guessed.", within="(0, 1)", masked_lm=True
    )
    short_seq_prob: float = flag(
        0.1, "Fraction of the samples that are made shorter than --seq-length.", within="[0, 1]", masked_lm=True
    )
    data_hash: str = derived("")
    """What the data set holds, told by its content alone; empty where no checkpoint is written or read."""
    tokenizer_hash: str = derived("")
    """The same of the tokenizer's files."""

    @property
    def is_split(self) -> bool:
        """Whether ``split`` cuts one blend in three; there are three blends otherwise."""
        return not self.train_data_path

    @property
    def blends(self) -> dict[str, tuple[Part, ...]]:
        """What is read for each split; nothing for one that has no data. Raises ValueError where it cannot be read."""
        if self.is_split:
            return dict.fromkeys(SPLITS, read_blend(self.data_path) if self.data_path else ())
        own = (self.train_data_path, self.valid_data_path, self.test_data_path)
        return {name: read_blend(words) if words else () for name, words in zip(SPLITS, own, strict=True)}

    @property
    def contents(self) -> tuple[tuple[str, ...], ...]:
        """The prefixes of the one blend that is split, or of each split's own."""
        blends = list(self.blends.values())
        return tuple(tuple(part.prefix for part in parts) for parts in (blends[:1] if self.is_split else blends))

    @property
    def proportions(self) -> str:
        """The shares of the same, in words."""
        blends = list(self.blends.values())
        return "; ".join(
            " ".join(str(part.share) for part in parts) for parts in (blends[:1] if self.is_split else blends)
        )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All data sets, each once."""
        return tuple(dict.fromkeys(part.prefix for parts in self.blends.values() for part in parts))
