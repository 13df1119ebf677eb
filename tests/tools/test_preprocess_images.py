"""Conversations with images become tokens with placeholders, a loss mask and pixels."""

import base64
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.data.image_dataset import ImageStore
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.data.splits import all_sources
from megatron.tokenizer import build_tokenizer
from megatron.tools.inference.images import decoded
from megatron.tools.preprocess import corpus, image_records
from megatron.tools.preprocess.job import ImageSettings, Job, Summary
from megatron.tools.preprocess.preprocess import preprocess
from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe

OUT = "out_images_document"
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
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bytes, and a few merges."""
    from megatron.tools.convert.vocabulary import Vocabulary

    folder = tmp_path_factory.mktemp("tokenizer")
    Vocabulary("GPT2BPETokenizer", *train_gpt2_bpe(["User: What? Assistant: A cat"] * 3, 270, 2)).write(folder)
    return folder


def convert(
    folder: Path, vocabulary: Path, name: str, log: Callable[[str], None] | None = None, **settings: Any
) -> Summary:
    """Convert a file, for encoders of 8 pixels and 4 placeholders, to ``folder/out``."""
    files = {"vocab_file": f"{vocabulary}/vocab.json", "merge_file": f"{vocabulary}/merges.txt"}
    job = Job(
        inputs=(folder / name,), output_prefix=f"{folder}/out", input_format="images", conversations="images",
        chat_template="examples/chat_template.jinja", skip_errors=log is not None, **files,
        **{"images": ImageSettings(folder, 8, 4, 1), **settings},
    )  # fmt: skip
    return preprocess(job, lambda summary: None, log or print)


def image_bytes(**settings: Any) -> bytes:
    """A PNG."""
    file = io.BytesIO()
    Image.new(**{"mode": "RGB", "size": (30, 20), "color": "red"} | settings).save(file, "png")
    return file.getvalue()


def write_json(path: Path) -> None:
    path.write_text(json.dumps(LLAVA))


def write_lines(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, OPENAI)))


def write_data_urls(path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(image_bytes()).decode()
    path.write_text("\n".join(map(json.dumps, OPENAI)).replace('"image": "a.png"', f'"image_url": {{"url": "{url}"}}')
                    .replace('"type": "image"', '"type": "image_url"'))  # fmt: skip


def tar_of(**first: Any) -> bytes:
    """A tar file of WebDataset, with these values in its first sample."""
    file = io.BytesIO()
    files = {"b/1.png": image_bytes(), "b/1.json": LLAVA[0] | first, "b/2.json": LLAVA[1]}
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_tar(path: Path) -> None:
    path.write_bytes(tar_of(image=None))


def write_parquet(path: Path) -> None:
    images = [[{"bytes": image_bytes(), "path": None}], []]
    rows = [
        {"images": of_row, "conversations": one["conversations"]} for of_row, one in zip(images, LLAVA, strict=True)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("in.json", write_json),
        ("in.jsonl", write_lines),
        ("urls.jsonl", write_data_urls),
        ("in.tar", write_tar),
        ("in.parquet", write_parquet),
    ],
)
def test_every_format_gives_the_same_data_set(
    tmp_path: Path, vocabulary: Path, name: str, write: Callable[[Path], None]
):
    (tmp_path / "a.png").write_bytes(image_bytes())
    write(tmp_path / name)
    done = convert(tmp_path, vocabulary, name)
    data, mask = IndexedDataset(tmp_path / OUT), IndexedDataset(tmp_path / f"{OUT}_loss_mask")
    tokenizer = build_tokenizer("GPT2BPETokenizer", f"{vocabulary}/vocab.json", f"{vocabulary}/merges.txt")
    assert (done.documents, done.images, done.bad_lines) == (2, 1, 0)
    assert done.tokens == data.num_tokens == mask.num_tokens
    ids, counted = data.span(0, done.tokens), mask.span(0, done.tokens)
    assert tokenizer.detokenize(ids[ids != 1]).split("<|endoftext|>") == [
        "User: \nWhat?\n\nAssistant: A cat", "User: Why?\n\nAssistant: So", ""
    ]  # fmt: skip
    assert tokenizer.detokenize(ids[counted == 1]) == " A cat<|endoftext|> So<|endoftext|>"
    assert (ids == 1).sum() == 4 and not counted[ids == 1].any()
    store = ImageStore(f"{tmp_path}/{OUT}", 2)
    assert store.starts.tolist() == [0, 1, 1] and (store.pixels == np.array([255, 0, 0])).all()


def test_a_multimodal_data_set_of_megatron_is_read(tmp_path: Path, vocabulary: Path):
    """Its images are files in numbers of four bytes, after how many of the last ones are padding; so may texts be.

    tests/data/test_megatron_core_interchange.py reads a data set of megatron-core.
    """
    eod = build_tokenizer("GPT2BPETokenizer", f"{vocabulary}/vocab.json", f"{vocabulary}/merges.txt").eod
    image = image_bytes()
    padding = -len(image) % 4
    with IndexedDatasetBuilder(tmp_path / "in", "i4") as builder:
        builder.add_document([5, 6, 7, eod, eod, eod], [padding, *np.frombuffer(image + bytes(padding), "i4")])
        builder.add_document([8, 9])
        builder.add_document([8, 300])
    assert IndexedDataset(tmp_path / "in").modes is None
    with pytest.raises(DataError, match="no modes"):
        convert(tmp_path, vocabulary, "in.idx")
    with open(tmp_path / "in.idx", "ab") as file:
        file.write(bytes([0, 1, 0, 0]))
    assert IndexedDataset(tmp_path / "in").modes.tolist() == [0, 1, 0, 0]
    with pytest.raises(DataError, match=r"in.idx has 1 sequences that are no text"):
        all_sources(DataConfig(data_path=(str(tmp_path / "in"),)))
    skipped: list[str] = []
    done = convert(tmp_path, vocabulary, "in.idx", skipped.append)
    assert (done.documents, done.images, done.counted) == (2, 1, 5) and "document 2: a token is not" in skipped[0]
    assert IndexedDataset(tmp_path / OUT).span(0, done.tokens).tolist() == [1, 1, 1, 1, 5, 6, 7, eod, 8, 9]
    assert IndexedDataset(tmp_path / f"{OUT}_loss_mask").span(0, 10).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 1]
    store = ImageStore(f"{tmp_path}/{OUT}", 2)
    assert store.starts.tolist() == [0, 1, 1] and (store.pixels == np.array([255, 0, 0])).all()


def test_colors_of_printing_are_converted():
    file = io.BytesIO()
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(file, "jpeg")
    assert np.abs(decoded(file.getvalue(), 2).astype(int) - (255, 0, 0)).max() < 10


def test_a_placeholder_after_the_vocabulary_has_room(tmp_path: Path, vocabulary: Path):
    (tmp_path / "a.png").write_bytes(image_bytes())
    write_json(tmp_path / "in.json")
    convert(tmp_path, vocabulary, "in.json", images=ImageSettings(tmp_path, 8, 4, 70_000))
    assert (IndexedDataset(tmp_path / OUT).get(0) == 70_000).sum() == 4


FAULTS: list[tuple[Any, str]] = [
    ({}, "object 1: no "),
    ({**LLAVA[1], "image": "a.png"}, "object 1: 0 times <image>, and 1 images"),
    ({**LLAVA[0], "images": ["a.png"]}, "object 1: there are image and images: give one"),
    ({**LLAVA[0], "messages": OPENAI[0]["messages"]}, "object 1: there are conversations and messages: give one"),
    ({**OPENAI[0], "image": "a.png"}, "object 1: images are named beside the messages and in them"),
    ({**LLAVA[0], "image": "../a.png"}, "no path within"),
    ({**LLAVA[0], "image": "/etc/hostname"}, "no path within"),
    ({**LLAVA[0], "image": "link.png"}, "no path within"),
    ({**LLAVA[0], "image": "a\0.png"}, "no path within"),
    ({**LLAVA[0], "image": 5}, "no path within"),
    ({**LLAVA[0], "image": "data:image/png;base64,?"}, "is not base64"),
    ({**LLAVA[0], "image": "b.png"}, "b.png: cannot be read"),
    ({**LLAVA[0], "image": "fifo.png"}, "fifo.png: cannot be read"),
    ({**LLAVA[0], "image": "half.png"}, "half.png: the image is damaged"),
    ({**LLAVA[0], "image": "deep.png"}, "deep.png: an image of more than 8 bits a color"),
    ({**LLAVA[0], "image": "many.png"}, "many.png: an image of 2 frames"),
    ({**LLAVA[0], "image": "bomb.png"}, "bomb.png: 5000 x 5000 pixels are more than"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "object 1: a part of a message is audio"),
    ({**LLAVA[0], "tools": [{"name": "f"}]}, "object 1: there are tools, which the chat template does not write"),
    ({"messages": [{"role": "user", "content": "Why?", "weight": 0}]}, "object 1: message 1 has a weight other than 1"),
    ({"messages": [{"role": "user", "content": "Why?"}]}, "object 1: no message of the assistant"),
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images that cannot be used, and one that can."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "half.png").write_bytes(image_bytes()[:60])
    (folder / "a.png").write_bytes(image_bytes())
    (folder / "deep.png").write_bytes(image_bytes(mode="I;16", color=40_000))
    (folder / "bomb.png").write_bytes(image_bytes(mode="1", size=(5_000, 5_000), color=1))
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(folder / "many.png", save_all=True, append_images=frames[1:])
    (folder / "link.png").symlink_to("/etc/hostname")
    os.mkfifo(folder / "fifo.png")
    return folder


def test_mistakes_are_named_skipped_and_counted(hostile: Path, vocabulary: Path):
    (hostile / "all.json").write_text(json.dumps([*(record for record, _ in FAULTS), LLAVA[0]]))
    skipped: list[str] = []
    done = convert(hostile, vocabulary, "all.json", skipped.append, workers=2)
    assert (done.documents, done.images, done.bad_lines) == (1, 1, len(FAULTS)) and len(skipped) == len(FAULTS)
    for (_, message), line in zip(FAULTS, skipped, strict=True):
        assert message.removeprefix("object 1: ") in line and "\n" not in line, line
    assert ImageStore(f"{hostile}/{OUT}", 1).starts.tolist() == [0, 1]
    for path in hostile.glob("out*"):
        path.unlink()


def test_what_expands_without_end_is_refused(tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch):
    """A sample of a tar file that is too large, and a column of Parquet that is hardly more than its repetition."""
    monkeypatch.setattr(image_records, "_LARGEST_SAMPLE", 1 << 16)
    monkeypatch.setattr(corpus, "LARGEST", 1 << 16)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("1.a.png", "1.b.png"):
            member = tarfile.TarInfo(name)
            member.size = 40_000
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(DataError, match="the sample of 1.b.png has more than 65,536 bytes"):
        convert(tmp_path, vocabulary, "a.tar")
    parquet.write_table(pyarrow.table({"messages": ["x" * 10_000_000]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(DataError, match="expands to more than"):
        convert(tmp_path, vocabulary, "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{}", "a.json: not a file of conversations"),
        ("a.jsonl", b"[", "a.jsonl:1: not JSON"),
        ("a.tar", b"no tar" * 200, "a.tar: not a file of conversations"),
        ("a.tar", tar_of(image=5), "a.tar: sample b/1: the image 5 is no path within"),
        ("a.tar", tar_of(images=["1.png"]), "there are image and images: give one"),
        ("a.parquet", b"PAR1", "a.parquet: not a file of conversations"),
        ("empty.jsonl", b"", "no document in"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, vocabulary: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        convert(tmp_path, vocabulary, name)
    assert "\n" not in str(error.value) and not [*tmp_path.glob("out*")]


def _archive(content: bytes) -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.frombuffer(content, np.uint8))
    return file.getvalue()


def _array(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


PIXELS, STARTS = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1, 2])
DAMAGED: dict[str, tuple[str, bytes | None, str]] = {
    "a FIFO": ("_images", None, "a FIFO, not a file"),
    "an empty file": ("_image_starts", b"", "is damaged"),
    "an archive": ("_images", _archive(b"abc"), "is damaged"),
    "a pickle": ("_images", _array(np.array([{}])), "is damaged"),
    "an open header": ("_images", b"\x93NUMPY\x01\x00" + (3000).to_bytes(2, "little") + b"(" * 3000, "is damaged"),
    "another version": ("_images", b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little"), "is damaged"),
    "huge images": ("_images", _array(PIXELS).replace(b"(2, 4, 4, 3)", b"(2,4,4,9**9)"), "is damaged"),
    "floats": ("_image_starts", _array(STARTS.astype(float)), "holds float64"),
    "gray images": ("_images", _array(PIXELS[..., :1]), "have 1 colors"),
    "starts that fall": ("_image_starts", _array(STARTS[::-1].copy()), "does not fit the 2 images"),
    "starts of another data set": ("_image_starts", _array(STARTS[:2]), "is of 1 documents"),
    "one image less": ("_images", _array(PIXELS[:1]), "does not fit the 1 images"),
    "a truncated file": ("_images", _array(PIXELS)[:-5], "is damaged (cannot reshape"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_store_of_images_is_one_line(tmp_path: Path, case: str):
    which, content, message = DAMAGED[case]
    for name, array in (("_images", PIXELS), ("_image_starts", STARTS)):
        (tmp_path / f"out{name}.npy").write_bytes(_array(array))
    assert len(ImageStore(f"{tmp_path}/out", 2).pixels) == 2
    (file := tmp_path / f"out{which}.npy").unlink()
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        ImageStore(f"{tmp_path}/out", 2)
    (line,) = caught.value.messages
    assert f"{tmp_path}/out_image" in line and message in line
