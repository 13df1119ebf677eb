"""Prompts with images: the same tokens as of transformers, and what is rejected."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.llava_models import IMAGE, transformers_model

from megatron.common.errors import DataError
from megatron.config import ParallelConfig
from megatron.model.llava import PIXELS
from megatron.parallel.layout import ParallelLayout
from megatron.tokenizer import build_tokenizer
from megatron.tools.convert.inspection import find, read_config
from megatron.tools.inference.decoding import BeamSearch, Sampling
from megatron.tools.inference.generator import TextGenerator
from megatron.tools.inference.images import ImagePrompt, decoded, marked, with_images
from megatron.tools.inference.model import LanguageModel, load_model
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.inference.source import Source

PICTURES = np.random.default_rng(3).integers(0, 256, (3, 28, 28, 3), dtype=np.uint8)
PROMPTS = [
    ImagePrompt([5, *[IMAGE] * 4, 7, *[IMAGE] * 4, 8, 9], PICTURES[:2]),
    ImagePrompt([3, 2, 1]),
    ImagePrompt([*[IMAGE] * 4, 11], PICTURES[2:]),
]
LIMITS = StoppingCriteria(context=32, new_tokens=12)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_greedy_tokens_are_those_of_transformers(run_ranks, tmp_path: Path, kind: str):
    """With two tensor-parallel ranks, with and without a cache, for prompts of no image, one and two together.

    Placeholders that stand for no image change nothing in other prompts.
    """
    theirs = transformers_model(kind)
    theirs.save_pretrained(tmp_path)
    expected = [_transformers_tokens(theirs, kind, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    for cached, recomputed, beam, after_others in run_ranks(2, _tokens, tmp_path):
        assert cached == recomputed == expected and beam == after_others == expected[0]


def _transformers_tokens(model: torch.nn.Module, kind: str, prompt: ImagePrompt) -> list[int]:
    images: dict[str, Any] = {}
    if prompt.images is not None:
        mean, deviation = map(torch.tensor, PIXELS[kind])
        images["pixel_values"] = ((torch.from_numpy(prompt.images) / 255 - mean) / deviation).permute(0, 3, 1, 2)
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 62}
    output: Any = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **images, **settings)
    tokens = output[0, len(prompt) :].tolist()
    return tokens[: tokens.index(62)] if 62 in tokens else tokens


def _tokens(path: Path) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    found = find(path)
    config = read_config(found)
    assert config is not None
    tokenizer = build_tokenizer("NullTokenizer", None, None, 64)
    tokenizer.eod = 62
    layout = ParallelLayout.create(ParallelConfig(model_parallel_size=2, world_size=2))
    model = LanguageModel(load_model(Source(found, config, tokenizer), layout), config, layout.tensor_group)
    made = []
    for use_cache in (True, False):
        generator = TextGenerator(model, tokenizer, use_cache=use_cache)
        completions = generator.complete(PROMPTS, Sampling(greedy=True), LIMITS)
        made.append([completion.tokens for (completion,) in completions])
    others = [ImagePrompt([11, IMAGE, IMAGE]), PROMPTS[0]]
    after_others = generator.complete(others, Sampling(greedy=True), LIMITS)[1][0].tokens
    return (*made, generator.search(PROMPTS[0], BeamSearch(1, 1.0, 1.0), LIMITS)[0].tokens, after_others)


def png(width: int = 4, height: int = 4, **more: Any) -> bytes:
    """An image file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG", **more)
    return file.getvalue()


def test_an_image_is_resized_and_takes_the_place_of_its_mark():
    from support.command_lines import parse

    model = parse("llava").model
    red = decoded(png(), model.vision_image_size)
    assert red.shape == (model.vision_image_size, model.vision_image_size, 3) and (red == (255, 0, 0)).all()
    prompt = with_images(marked("ab", 1), [red], model, lambda text: list(text.encode()))
    assert list(prompt) == [*[model.image_token_id] * model.image_tokens, 10, 97, 98]
    assert prompt.images is not None and len(prompt.images) == 1
    with pytest.raises(DataError, match="1 times <image>, and 2 images"):
        with_images("<image>", [red, red], model, lambda text: [])
    with pytest.raises(DataError, match=f"the text has token {model.image_token_id}, which only images may have"):
        with_images("ab", [], model, lambda text: [1, model.image_token_id])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", "no image: give one of"),
        (png()[:50], "damaged"),
        (png(5000, 5000), "25000000? x?|pixels are more"),
        (png(save_all=True, append_images=[Image.new("RGB", (4, 4), "blue")]), "2 frames"),
    ],
)
def test_what_is_no_usable_image_is_an_error_of_one_line(content: bytes, message: str):
    with pytest.raises(DataError, match=message) as error:
        decoded(content, 28)
    assert "\n" not in str(error.value)
