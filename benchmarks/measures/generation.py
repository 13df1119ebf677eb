"""New tokens per second, compared with transformers on the same weights, and without the key-value cache.

A GPT-2 with random weights is written as a Hugging Face folder, which both read, in fp32. Both decode greedily. The
time of this project includes the text; that of transformers only the tokens. All tokens must be equal.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.comparing import Comparison, alternate
from megatron.config import ParallelConfig
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout
from megatron.tokenizer.base import EOD
from megatron.tools.convert.vocabulary import Vocabulary
from megatron.tools.inference.decoding import Sampling
from megatron.tools.inference.generator import TextGenerator
from megatron.tools.inference.model import LanguageModel, load_model
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.inference.source import open_source

Tokens = list[list[int]]
Way = Callable[[Tokens], Tokens]


@dataclass(frozen=True)
class Size:
    """Of a model and its texts."""

    layers: int
    hidden: int
    vocabulary: int
    prompt: int = 32
    new: int = 32
    batches: tuple[int, ...] = (1, 8)
    """Texts at once."""
    recomputes: bool = True
    """Whether generation without a key-value cache is measured, too."""

    def __str__(self) -> str:
        sizes = f"{self.layers} layers, h {self.hidden}, v {self.vocabulary}"
        return f"{sizes}; {self.new} new tokens, prompt of {self.prompt}"


MOST_ROUNDS = 5
"""The larger model takes half a minute a round."""
SIZES = (Size(6, 256, 16384), Size(12, 768, 50257, recomputes=False))


def measure(rounds: int) -> list[Comparison]:
    """Every size, one text and eight at once, in at most ``MOST_ROUNDS``."""
    rounds = min(rounds, MOST_ROUNDS)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    silence_known_warnings()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    with distributed(ParallelConfig()) as layout, deepspeed_silenced(verbose=False):
        return [found for size in SIZES for found in _of_size(size, rounds, layout)]


def _of_size(size: Size, rounds: int, layout: ParallelLayout) -> list[Comparison]:
    with TemporaryDirectory() as name:
        write_model(size, Path(name))
        ways = {"suite": _ours(Path(name), layout, size.new), "transformers": _theirs(Path(name), size.new)}
        if size.recomputes:
            ways["the suite with --recompute"] = _ours(Path(name), layout, size.new, use_cache=False)
        prompt = torch.randint(size.vocabulary, (size.prompt,)).tolist()
        return [found for batch in size.batches for found in _of_batch(size, ways, [prompt] * batch, rounds)]


def _of_batch(size: Size, ways: dict[str, Way], prompts: Tokens, rounds: int) -> list[Comparison]:
    made: dict[str, Tokens] = {}
    times = alternate({way: lambda way=way: made.update({way: ways[way](prompts)}) for way in ways}, rounds)
    if any(tokens != made["suite"] for tokens in made.values()):
        raise AssertionError("not the same tokens")
    ours, tokens = times.pop("suite"), sum(map(len, made["suite"]))
    what = f"{len(prompts)} at once, h {size.hidden}: {size}"
    return [Comparison(what, peer, ours, theirs, tokens, "tokens") for peer, theirs in times.items()]


def _ours(folder: Path, layout: ParallelLayout, new_tokens: int, *, use_cache: bool = True) -> Way:
    source = open_source(folder)
    model = LanguageModel(load_model(source, layout), source.config, layout.tensor_group)
    generator = TextGenerator(model, source.tokenizer, use_cache=use_cache)
    limits = StoppingCriteria(context=source.config.max_position_embeddings, new_tokens=new_tokens)
    return lambda prompts: [texts[0].tokens for texts in generator.complete(prompts, Sampling(greedy=True), limits)]


def _theirs(folder: Path, new_tokens: int) -> Way:
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    eod = model.config.eos_token_id
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": eod}

    def run(prompts: Tokens) -> Tokens:
        tokens = torch.tensor(prompts)
        texts = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return [[token for token in text[len(prompts[0]) :].tolist() if token != eod] for text in texts]

    return run


def write_model(size: Size, folder: Path) -> None:
    """Random weights, and a vocabulary that has a name for every token."""
    torch.manual_seed(1)
    eod, positions = size.vocabulary - 1, size.prompt + size.new
    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=max(positions, 1024),
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=max(size.hidden // 64, 1),
        initializer_range=0.1,
        bos_token_id=eod,
        eos_token_id=eod,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"word{number}" for number in range(eod - len(names))]
    tokens = {name: id for id, name in enumerate([*names, EOD])}
    Vocabulary("GPT2BPETokenizer", tokens).write(folder, positions=positions)
