"""--pre-tokens, --next-tokens and --shape-order of the tools that use a model, against transformers."""

import argparse
from pathlib import Path

import pytest
import torch

from megatron.common.errors import ConfigError
from megatron.tools.inference.model_flags import add_model_flags, source_of
from megatron.tools.inference.source import Source

WINDOW = 5
STEPS = 12
PROMPTS = [[5, 9, 2], [70, 71, 72, 73, 74, 75, 76, 77, 78, 79]]


def chosen_source(path: Path, *words: str) -> Source:
    """The model as the tools find it with these flags."""
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    return source_of(parser.parse_args(["--load", str(path), *words]), {})


def greedy_steps(path: Path, words: list[str], use_cache: bool) -> list[tuple[list[list[int]], torch.Tensor]]:
    """Tokens so far, and the logits [b, v] of the next one, at each step of generation; on the ranks that call it."""
    from megatron.config import ParallelConfig
    from megatron.launch.distributed import distributed
    from megatron.tools.inference.batches import DecodingBatch
    from megatron.tools.inference.model import LanguageModel, load_model

    source = chosen_source(path, *words)
    with distributed(ParallelConfig()) as layout:
        model = LanguageModel(load_model(source, layout), source.config, layout.tensor_group)
        batch = DecodingBatch(model, PROMPTS, context=64, use_cache=use_cache)
        steps = []
        for _ in range(STEPS):
            steps.append(([list(sequence) for sequence in batch.sequences], batch.logits.clone()))
            batch.append(batch.logits.argmax(-1).tolist())
    return steps


def windowed_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The logits [v] after ``tokens`` by transformers, each of which attends to ``WINDOW`` tokens before it."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    back = torch.arange(len(tokens)).unsqueeze(1) - torch.arange(len(tokens))
    mask = torch.zeros(back.shape).masked_fill((back < 0) | (back > WINDOW), torch.finfo().min)
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0, -1]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "recomputed"])
def test_generation_with_a_window_equals_transformers_with_its_mask(run_ranks, foreign: Path, use_cache: bool) -> None:
    words = ["--pre-tokens", str(WINDOW), "--next-tockens", "0", "--shape-order", "SBH"]
    (steps,) = run_ranks(1, greedy_steps, foreign, words, use_cache)
    for sequences, logits in steps[:: STEPS - 1]:
        for tokens, ours in zip(sequences, logits, strict=True):
            torch.testing.assert_close(ours, windowed_logits(foreign, tokens), rtol=1e-4, atol=1e-4)
    (whole,) = run_ranks(1, greedy_steps, foreign, [], use_cache)
    assert (whole[-1][1] - steps[-1][1]).abs().max() > 0.1, "the window matters"


def test_a_flag_replaces_the_value_of_the_checkpoint_and_a_line_says_so(foreign: Path, capsys) -> None:
    assert chosen_source(foreign, "--pre-tokens", "65536", "--shape-order", "BSH").config.pre_tokens == 65536
    assert capsys.readouterr().err == ""
    assert chosen_source(foreign, "--pre-tokens", "3").config.pre_tokens == 3
    assert capsys.readouterr().err.endswith(f"warning: --pre-tokens 3 replaces 65536 of {foreign}\n")
    with pytest.raises(ConfigError, match="--pre-tokens -1 must be 0 or more"):
        chosen_source(foreign, "--pre-tokens", "-1")
