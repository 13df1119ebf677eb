"""What each model reads. No torch here."""

from collections.abc import Callable
from typing import NamedTuple

from megatron.config.architecture import BERT, GPT2
from megatron.data import bert_dataset, gpt2_dataset
from megatron.data.gpt2_dataset import Datasets


class Source(NamedTuple):
    """Where samples come from."""

    check_data: Callable[..., None]
    """Looks for the faults that an index shows, and builds nothing."""
    build_datasets: Callable[..., Datasets]


SOURCES = {
    GPT2.name: Source(gpt2_dataset.check_data, gpt2_dataset.build_datasets),
    BERT.name: Source(bert_dataset.check_data, bert_dataset.build_datasets),
}
