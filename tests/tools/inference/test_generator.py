"""Texts of one process, of two tensor-parallel ranks, with and without what is kept, and of transformers."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
PROMPTS = [[5], [70, 71, 72, 73, 74, 75, 76, 77, 78, 79], [10, 3, 10]]
BEAMS = {"length_penalty": 0.5, "repetition_penalty": 1.2}


def greedy_with_ours(path: Path, length: int) -> dict[str, Any]:
    """The most likely tokens after each prompt, computed in three ways, on the ranks that this is called on."""
    from megatron.tools.inference.decoding import Sampling
    from megatron.tools.inference.prompts import StoppingCriteria

    greedy = Sampling(greedy=True)
    limits = StoppingCriteria(context=128, new_tokens=length)
    with _generator(path) as kept, _generator(path, use_cache=False) as anew:
        return {
            "kept": _tokens(kept.complete(PROMPTS, greedy, limits)),
            "alone": [
                *_tokens(kept.complete(PROMPTS[:1], greedy, limits)),
                *_tokens(kept.complete(PROMPTS[1:], greedy, limits)),
            ],
            "anew": _tokens(anew.complete(PROMPTS, greedy, limits)),
        }


def all_ways(path: Path) -> dict[str, Any]:
    """What else a generator does, on the ranks that this is called on."""
    from megatron.tools.inference.decoding import BeamSearch, Sampling
    from megatron.tools.inference.prompts import StoppingCriteria

    few, slides = StoppingCriteria(context=128, new_tokens=30), StoppingCriteria(context=24, new_tokens=60, slides=True)
    some = Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=7)
    penalized = Sampling(greedy=True, repetition_penalty=1.3)
    with _generator(path) as kept, _generator(path, use_cache=False) as anew:
        texts = [sample.text for sample in kept.complete(PROMPTS[1:2], some, few, samples=3)[0]]
        stopped = StoppingCriteria(context=128, new_tokens=30, stop=(texts[1][9:12],))
        pieces = list(kept.stream(PROMPTS, some, few, samples=2))
        return {
            "samples": texts,
            "among others": [sample.text for sample in kept.complete(PROMPTS, some, few, samples=3)[1]],
            "later": kept.complete(PROMPTS[1:2], some, few, first_sample=2)[0][0].text,
            "another seed": kept.complete(PROMPTS[1:2], Sampling(seed=8), few)[0][0].text,
            "stopped": kept.complete(PROMPTS[1:2], some, stopped, samples=2)[0][1],
            "penalized": _tokens(kept.complete(PROMPTS, penalized, few)),
            "beams": [_told(kept.search(prompt, BeamSearch(4, **BEAMS), few)) for prompt in PROMPTS],
            "beams anew": [_told(anew.search(prompt, BeamSearch(4, **BEAMS), few)) for prompt in PROMPTS],
            "slid": _tokens(kept.complete(PROMPTS, Sampling(greedy=True), slides)),
            "slid anew": _tokens(anew.complete(PROMPTS, Sampling(greedy=True), slides)),
            "to a length": _tokens(
                kept.complete(PROMPTS, Sampling(greedy=True), StoppingCriteria(128, out_seq_length=12))
            ),
            "reasons": sorted({piece.finish_reason for piece in pieces if piece.finish_reason}),
            "in pieces": "".join(piece.text for piece in pieces if (piece.prompt, piece.sample) == (1, 1)),
        }


def together(path: Path) -> list[list[list[int]]]:
    """Tokens of several requests: of each alone, and of all in a batch that they join and leave at different steps."""
    from megatron.tools.inference.continuous_batch import Joining
    from megatron.tools.inference.decoding import Sampling
    from megatron.tools.inference.generator import Completion
    from megatron.tools.inference.prompts import StoppingCriteria

    hot = Sampling(temperature=1.5, top_k=50, seed=7)
    requests = {  # the step at which it joins: prompts, sampling, new tokens, samples
        0: (PROMPTS[:1], Sampling(greedy=True), 30, 1),
        1: (PROMPTS[1:], hot, 12, 2),
        4: (PROMPTS[2:], Sampling(temperature=1.5, top_p=0.9, seed=8), 40, 1),
        5: (PROMPTS[:1], Sampling(greedy=True, repetition_penalty=1.3), 20, 1),
        20: (PROMPTS[1:2], hot, 10, 3),
    }
    with _generator(path) as generator:
        alone, joined, batch = [], {step: {} for step in requests}, generator.batch()
        for prompts, sampling, new, samples in requests.values():
            texts = generator.complete(prompts, sampling, StoppingCriteria(128, new_tokens=new), samples=samples)
            alone += [completion.tokens for completions in texts for completion in completions]
        for step in range(60):
            if joining := [4, 5] if step == 5 else [step] if step in requests and step != 4 else []:
                batch.join(
                    *(
                        Joining(request, prompts, sampling, StoppingCriteria(128, new_tokens=new), samples)
                        for request in joining
                        for prompts, sampling, new, samples in [requests[request]]
                    )
                )
            if step == 3:  # one that is gone before it is finished
                batch.join(Joining("gone", PROMPTS[:2], hot, StoppingCriteria(128, new_tokens=50)))
            if step == 6:
                batch.leave("gone")
            for request, piece in batch.choose():
                if request != "gone":
                    joined[request].setdefault((piece.prompt, piece.sample), Completion()).add(piece)
            batch.advance()
        assert len(batch) == 0
        return [alone, [texts[place].tokens for texts in joined.values() for place in sorted(texts)]]


def with_one_that_fails(path: Path) -> dict[str, Any]:
    """What a batch of an untied model writes for requests, of which the one with a certain token has no logits."""
    from megatron.common.errors import NumericsError
    from megatron.tools.inference.continuous_batch import Joining
    from megatron.tools.inference.decoding import Sampling
    from megatron.tools.inference.prompts import StoppingCriteria

    greedy, hot, limits = Sampling(greedy=True), Sampling(seed=7), StoppingCriteria(128, new_tokens=30)
    with _generator(path) as generator:
        texts = {name: generator.complete(PROMPTS[:1], how, limits)[0][0] for name, how in (("0", greedy), ("1", hot))}
        used = {token for text in texts.values() for token in text.tokens}
        bad = next(token for token in range(100) if token not in used and [token] != PROMPTS[0])
        words: Any = list(generator.model.module.forward_funcs)[0]
        words.word_embeddings.weight.data[bad] = torch.nan
        batch, written, failed = generator.batch(), {name: [] for name in texts}, []
        batch.join(*(Joining(name, [[bad] * 40], how, limits) for name, how in (("bad", greedy), ("worse", hot))))
        batch.join(Joining("0", PROMPTS[:1], greedy, limits))
        while len(batch):
            for request, piece in batch.choose():
                written.get(request, failed).append(piece)
            batch.advance()
            if failed and not written["1"]:
                batch.join(Joining("1", PROMPTS[:1], hot, limits))
        with pytest.raises(NumericsError, match="not finite"):
            generator.complete([[bad]], greedy, limits)
        return {
            "alone": [text.tokens for text in texts.values()],
            "among others": [
                [piece.token for piece in pieces if piece.token is not None] for pieces in written.values()
            ],
            "failed": [(piece.token, piece.text, piece.finish_reason) for piece in failed],
        }


@contextmanager
def _generator(path: Path, *, use_cache: bool = True):
    from megatron.config import ParallelConfig
    from megatron.launch.distributed import distributed
    from megatron.tools.inference.generator import TextGenerator
    from megatron.tools.inference.model import LanguageModel, load_model
    from megatron.tools.inference.source import open_source

    size, source = int(os.environ["WORLD_SIZE"]), open_source(path)
    with distributed(ParallelConfig(model_parallel_size=size, world_size=size)) as layout:
        model = LanguageModel(load_model(source, layout), source.config, layout.tensor_group)
        yield TextGenerator(model, source.tokenizer, use_cache=use_cache)


def _tokens(completions) -> list[list[int]]:
    return [completion.tokens for (completion,) in completions]


def _told(completions) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def theirs(folder: Path, prompt: list[int], new_tokens: int, **settings: Any) -> list[list[int]]:
    """The continuation of a prompt by transformers, without the end of document."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    eod = model.config.eos_token_id
    texts = model.generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=eod, **settings
    )
    return [[token for token in text[len(prompt) :].tolist() if token != eod] for text in texts]


@pytest.fixture(scope="module")
def on_one_and_two(foreign: Path, _rank_pools) -> dict[int, list[dict[str, Any]]]:
    return {size: _rank_pools.run(size, all_ways, foreign) for size in (1, 2)}


@pytest.mark.parametrize(("trained", "written", "length"), [("cut", "exported", 60), ("llama", "exported_llama", 40)])
def test_greedy_text_of_a_sharded_checkpoint_equals_transformers(
    request: pytest.FixtureRequest, run_ranks, trained: str, written: str, length: int
):
    ours, folder = (request.getfixturevalue(name) for name in (trained, written))
    (one,) = run_ranks(1, greedy_with_ours, ours, length)
    two = run_ranks(2, greedy_with_ours, ours, length)
    expected = [theirs(folder, prompt, length)[0] for prompt in PROMPTS]
    assert max(len(tokens) for tokens in expected) == length
    assert max(len(set(tokens)) for tokens in expected) > 10, "no text that any model would write"
    assert one == dict.fromkeys(one, expected)
    assert two == [one, one]


def test_two_ranks_generate_the_same_text(on_one_and_two):
    (one,) = on_one_and_two[1]
    assert on_one_and_two[2] == [one, one]


@pytest.mark.parametrize("size", [1, 2])
def test_requests_in_a_batch_get_the_texts_that_each_gets_alone(run_ranks, foreign: Path, size: int):
    for alone, joined in run_ranks(size, together, foreign):
        assert joined == alone and len(set(map(tuple, alone))) == len(alone)


def test_logits_that_are_not_finite_end_their_request_alone(run_ranks, llama: Path):
    """Nor do they reach a request that later takes its place in the cache."""
    (found,) = run_ranks(1, with_one_that_fails, llama)
    assert found["failed"] == [(None, "", "error")] * 2
    assert found["among others"] == found["alone"] and all(map(len, found["alone"]))


def test_samples(on_one_and_two):
    (ways,) = on_one_and_two[1]
    assert len(set(ways["samples"])) == 3
    assert ways["among others"] == ways["samples"] and ways["later"] == ways["samples"][2]
    assert ways["another seed"] not in ways["samples"]


def test_streamed_pieces_add_up_to_the_text(on_one_and_two):
    (ways,) = on_one_and_two[1]
    assert ways["in pieces"] == ways["samples"][1]
    assert "length" in ways["reasons"] and set(ways["reasons"]) <= {"length", "stop"}


def test_a_stop_string_ends_the_text(on_one_and_two):
    (ways,) = on_one_and_two[1]
    stopped, whole = ways["stopped"], ways["samples"][1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.find(whole[9:12])]
    assert 0 < len(stopped.tokens) < 30


def test_sliding_window(on_one_and_two):
    (ways,) = on_one_and_two[1]
    assert ways["slid"] == ways["slid anew"] and max(map(len, ways["slid"])) == 60


def test_texts_of_one_length_from_prompts_of_several(on_one_and_two, foreign: Path):
    (ways,) = on_one_and_two[1]
    expected = [theirs(foreign, prompt, 12 - len(prompt))[0] for prompt in PROMPTS]
    assert ways["to a length"] == expected


def test_a_penalty_and_beams_are_those_of_transformers(on_one_and_two, foreign: Path):
    (ways,) = on_one_and_two[1]
    assert ways["penalized"] == [theirs(foreign, prompt, 30, repetition_penalty=1.3)[0] for prompt in PROMPTS]
    expected = [theirs(foreign, prompt, 30, num_beams=4, num_return_sequences=4, **BEAMS) for prompt in PROMPTS]
    assert ways["beams"] == ways["beams anew"] == expected
