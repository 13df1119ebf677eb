"""Specs of the architectures: GPT-2, BERT, BERT with a classifier head, T5 and LLaVA, a file for each. No torch here.

The GPT-2 spec also covers the Llama family, which its flags select.
"""

from megatron.model.architectures.bert import BERT, CLASSIFIER
from megatron.model.architectures.gpt2 import GPT2
from megatron.model.architectures.llava import LLAVA
from megatron.model.architectures.t5 import T5
from megatron.model.spec import ARCHITECTURES, architecture_of, register

__all__ = ["ARCHITECTURES", "BERT", "CLASSIFIER", "GPT2", "LLAVA", "T5", "architecture_of"]

for _spec in (GPT2, BERT, CLASSIFIER, T5, LLAVA):
    register(_spec)
