"""How many tokens a second this suite and transformers put behind a prompt, on the same weights and the same CPU.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/generation.py

A GPT-2 with random weights is written as a Hugging Face folder, which both read, in fp32. Both take the likeliest token
and keep keys and values; round after round they take turns, so that whatever else the machine does meets both alike.
The suite's time has the text in it, piece by piece; that of transformers, which needs not decode, is of tokens alone.
Figures are medians, with the least and the largest, by the clock and by the processor's time, in which other programs
of a busy machine do not count. The tokens of both are compared.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.cli import ToolParser, run_tool  # noqa: E402
from megatron.config import ParallelConfig  # noqa: E402
from megatron.inference.limits import Limits  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402

Tokens = list[list[int]]
CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}
Rates = dict[str, dict[str, list[float]]]
"""Tokens a second of each round, by way and clock."""


def main() -> None:
    """Make the model, measure, print."""
    args = _parser().parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prepare_environment(os.environ)

    import torch

    from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
    from megatron.mpu.layout import distributed

    silence_known_warnings()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    with distributed(ParallelConfig()) as layout, TemporaryDirectory() as folder:
        with deepspeed_silenced(verbose=False):
            _write_model(args, Path(folder))
            ways = {
                "suite": _ours(Path(folder), layout, args.new_tokens),
                "suite, nothing kept": _ours(Path(folder), layout, args.new_tokens, keeps=False),
                "transformers": _theirs(Path(folder), args.new_tokens),
            }
        if args.skip_recompute:
            del ways["suite, nothing kept"]
        prompt = torch.randint(args.vocab_size, (args.prompt_tokens,)).tolist()
        figures = {size: _measure(ways, [prompt] * size, args) for size in args.batch_sizes}
    print(
        f"{args.layers} layers, hidden {args.hidden_size}, {args.vocab_size:,} tokens; prompt {args.prompt_tokens}, "
        f"{args.new_tokens} new; {torch.get_num_threads()} threads of {os.cpu_count()} cores, {args.rounds} rounds"
    )
    print(f"{'tokens/s':32} {'by the clock':24} by processor time")
    for size, rates in figures.items():
        for way, clocks in rates.items():
            print(f"batch {size:3}  {way:20}   " + " ".join(f"{_spread(each):24}" for each in clocks.values()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def _spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):.1f} ({min(figures):.1f}-{max(figures):.1f})"


def _measure(ways: dict[str, Callable[[Tokens], Tokens]], prompts: Tokens, args: argparse.Namespace) -> Rates:
    """Rates of each round by way and clock, all rows of the batch together, behind a round that does not count."""
    rates: Rates = {way: {clock: [] for clock in CLOCKS} for way in ways}
    for number in range(args.rounds + 1):
        made = {}
        for way, run in _rotated(ways, number):
            begins = {name: clock() for name, clock in CLOCKS.items()}
            made[way] = run(prompts)
            seconds = {name: clock() - begins[name] for name, clock in CLOCKS.items()}
            for name in CLOCKS if number else ():
                rates[way][name].append(sum(map(len, made[way])) / seconds[name])
        assert all(tokens == made["suite"] for tokens in made.values()), "not the same tokens"
    return rates


def _rotated(ways: dict[str, Callable], number: int) -> list[tuple[str, Callable]]:
    """``ways`` from another one on in each round, so that none is always the one behind the same."""
    items = list(ways.items())
    start = number % len(items)
    return items[start:] + items[:start]


def _ours(folder: Path, layout, new_tokens: int, *, keeps: bool = True) -> Callable[[Tokens], Tokens]:
    from megatron.inference.continuation import LanguageModel
    from megatron.inference.generator import TextGenerator
    from megatron.inference.loading import load_model
    from megatron.inference.sampling import Sampling
    from megatron.inference.source import open_source

    source = open_source(folder)
    model = LanguageModel(load_model(source, layout), source.config, layout.tensor_group)
    generator = TextGenerator(model, source.tokenizer, keeps=keeps)
    limits = Limits(context=source.config.max_position_embeddings, new_tokens=new_tokens)

    def run(prompts: Tokens) -> Tokens:
        return [texts[0].tokens for texts in generator.complete(prompts, Sampling(greedy=True), limits)]

    return run


def _theirs(folder: Path, new_tokens: int) -> Callable[[Tokens], Tokens]:
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    eod = model.config.eos_token_id
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": eod}

    def run(prompts: Tokens) -> Tokens:
        tokens = torch.tensor(prompts)
        texts = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return [[token for token in text[len(prompts[0]) :].tolist() if token != eod] for text in texts]

    return run


def _write_model(args: argparse.Namespace, folder: Path) -> None:
    """Random weights, and a vocabulary that has a name for every token."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron.checkpoint.exchange.huggingface_tokenizer import BPE, write_folder_bpe
    from megatron.tokenizer.vocabulary import EOD

    torch.manual_seed(1)
    eod, positions = args.vocab_size - 1, args.prompt_tokens + args.new_tokens
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=max(positions, 1024),
        n_embd=args.hidden_size,
        n_layer=args.layers,
        n_head=max(args.hidden_size // 64, 1),
        initializer_range=0.1,
        bos_token_id=eod,
        eos_token_id=eod,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"word{number}" for number in range(eod - len(names))]
    write_folder_bpe(BPE({name: id for id, name in enumerate([*names, EOD])}, []), folder, positions=positions)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    for name, default in {
        "layers": 12, "hidden-size": 768, "vocab-size": 50257, "prompt-tokens": 32, "new-tokens": 64, "rounds": 7
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="N", help="prompts at once")
    parser.add_argument("--skip-recompute", action="store_true", help="leave out the way that keeps nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    return parser


if __name__ == "__main__":
    run_tool(main)
