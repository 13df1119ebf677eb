"""Conversations with images become tokens with placeholders, a loss mask and pixels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.common.errors import DataError
from megatron.data.image_store import ImageStore
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tools.chat.files import chat_template
from megatron.tools.preprocess.image_conversations import ImageJob, preprocess_images
from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe

LLAVA = [
    {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat"}],
    },
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So"}]},
]
OPENAI = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A cat"},
        ]
    },
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and a few merges."""
    from megatron.tools.convert.huggingface_files import Vocabulary

    folder = tmp_path_factory.mktemp("tokenizer")
    Vocabulary("GPT2BPETokenizer", *train_gpt2_bpe(["User: What? Assistant: A cat"] * 3, 270, 2)).write(folder)
    return build_tokenizer("GPT2BPETokenizer", f"{folder}/vocab.json", f"{folder}/merges.txt")


def convert(folder: Path, tokenizer: Tokenizer, records: Any, name: str = "in.json") -> tuple[int, int, int]:
    """Convert a file of these records, for encoders of 8 pixels and 4 placeholders."""
    (folder / name).write_text(json.dumps(records) if name == "in.json" else "\n".join(map(json.dumps, records)))
    Image.new("RGB", (30, 20), "red").save(folder / "a.png")
    job = ImageJob(folder / name, folder, f"{folder}/out", 8, 4, 1)
    return preprocess_images(job, tokenizer, chat_template("examples/chat_template.jinja", tokenizer))


@pytest.mark.parametrize(("records", "name"), [(LLAVA, "in.json"), (OPENAI, "in.jsonl")])
def test_both_formats_give_the_same_data_set(tmp_path: Path, tokenizer: Tokenizer, records: Any, name: str):
    documents, tokens, images = convert(tmp_path, tokenizer, records, name)
    data, mask = IndexedDataset(tmp_path / "out"), IndexedDataset(tmp_path / "out_loss_mask")
    assert (documents, tokens, images) == (2, data.num_tokens, 1) == (2, mask.num_tokens, 1)
    ids, counted = data.span(0, tokens), mask.span(0, tokens)
    assert tokenizer.detokenize(ids[ids != 1]).split("<|endoftext|>") == [
        "User: \nWhat?\n\nAssistant: A cat", "User: Why?\n\nAssistant: So", ""
    ]  # fmt: skip
    assert tokenizer.detokenize(ids[counted == 1]) == " A cat<|endoftext|> So<|endoftext|>"
    assert (ids == 1).sum() == 4 and not counted[ids == 1].any()
    store = ImageStore(f"{tmp_path}/out", 2)
    assert store.starts.tolist() == [0, 1, 1] and (store.pixels == np.array([255, 0, 0])).all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "object 1: no "),
        ({**LLAVA[1], "image": "a.png"}, "object 1: 0 times <image>, and 1 images"),
        ({**LLAVA[0], "image": "../a.png"}, "no path within"),
        ({**LLAVA[0], "image": "b.png"}, "b.png: cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "object 1: a part of a message is audio"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, tokenizer: Tokenizer, record: Any, message: str):
    with pytest.raises(DataError, match=message) as error:
        convert(tmp_path, tokenizer, [record])
    assert "\n" not in str(error.value) and not (tmp_path / "out.idx").exists()
