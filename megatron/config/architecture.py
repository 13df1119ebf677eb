"""The models of the suite, and what parts that see none of their layers have to know of them."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """A model, as far as the command line and the loss are concerned."""

    name: str
    program: str
    """What trains it."""
    tokenizers: tuple[str, ...]
    """The kinds of tokenizer whose vocabulary has the tokens that it needs."""
    masked_lm: bool = False
    """Whether samples are pairs of sentences: the loss is over the tokens that were hidden and over the order."""


GPT2 = Architecture("GPT-2", "pretrain_gpt2.py", ("GPT2BPETokenizer", "WhitespaceTokenizer"))
BERT = Architecture("BERT", "pretrain_bert.py", ("BertWordPieceLowerCase", "BertWordPieceCase"), masked_lm=True)

ARCHITECTURES = {architecture.name: architecture for architecture in (GPT2, BERT)}
