"""Data sets, checkpoints and weights of any content are read, or refused with their exit code; no reader writes."""

import io
import json
from functools import cache
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from support.command_lines import parse
from support.fuzzing import altered, damaged, outcome, scratch, unchanged

from megatron.checkpoint.files import record_of
from megatron.checkpoint.manifest import MANIFEST, _render, check_content, check_sizes, read_manifest
from megatron.checkpoint.run_file import RUN_FILE, describe
from megatron.checkpoint.tensor_files import check_identity, read_file
from megatron.checkpoint.tracker import LATEST, newest
from megatron.common.errors import DataError
from megatron.config import DataConfig, ModelConfig
from megatron.data.datasets import build_datasets
from megatron.data.index_file import HEADER
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.model.huggingface import config_of, read_json
from megatron.tools.convert.full_model import check_sizes as check_model
from megatron.tools.convert.full_model import read_tensors
from megatron.tools.convert.inspection import find, read_config
from megatron.tools.convert.vocabulary import read_folder_tokenizer
from megatron.tools.inference.images import FORMATS, decoded
from megatron.tools.preprocess.job import Journal, Milestone, Summary, Written


@cache
def index() -> tuple[bytes, bytes]:
    """The two files of a data set of 8 documents, one of them empty."""
    with scratch() as folder:
        with IndexedDatasetBuilder(folder / "data", "u2") as builder:
            for length in (5, 1, 9, 0, 30, 2, 7, 11):
                builder.add_document(range(length))
            builder.finish()
        return (folder / "data.idx").read_bytes(), (folder / "data.bin").read_bytes()


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    """An index with a field or an entry of another value, or with other bytes."""
    content = bytearray(index()[0])
    if draw(st.booleans()):
        return draw(damaged(bytes(content)))
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            offset, size = draw(st.sampled_from([(9, 8), (17, 1), (18, 8), (26, 8)]))
        else:
            size = draw(st.sampled_from([4, 8]))
            offset = draw(st.integers(HEADER.size, len(content) - size))
        value = draw(st.one_of(st.integers(-3, 40), st.integers(-(2 ** (8 * size - 1)), 2 ** (8 * size) - 1)))
        content[offset : offset + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(content)


@given(indexes(), damaged(index()[1]) | st.just(index()[1]), st.integers(1, 40))
def test_indexes_of_data_sets(idx: bytes, tokens: bytes, seq_length: int) -> None:
    with scratch() as folder:
        (folder / "data.idx").write_bytes(idx)
        (folder / "data.bin").write_bytes(tokens)
        with unchanged(folder):
            dataset = outcome(lambda: IndexedDataset(folder / "data"), 3)
        if dataset is None:
            return
        assert sum(len(dataset.get(number)) for number in range(len(dataset))) == dataset.num_tokens
        data = DataConfig(data_path=(str(folder / "data"),), seq_length=seq_length, split="1")
        samples = outcome(lambda: build_datasets(data, {"train": 18}, vocab_size=40, seed=1).train, 3)
        if samples is not None:
            rows = outcome(lambda: samples.take(range(18)), 3)
            assert rows is None or rows.shape == (18, seq_length + 1)


RUN = describe(parse("--model-parallel-size 1 --pipe-parallel-size 2", ranks=2), 6)


def write_checkpoint(folder: Path, description: object) -> None:
    """A checkpoint of iteration 6 with a ``run.json`` as if it had been saved so, and a file of tensors."""
    tag = folder / "global_step6"
    tag.mkdir()
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"12345678")
    (tag / RUN_FILE).write_text(json.dumps(description))
    records = {path.name: record_of(path) for path in sorted(tag.iterdir())}
    (tag / MANIFEST).write_text(_render(records))
    (folder / LATEST).write_text(tag.name)


@given(damaged(b"global_step6"), st.data())
def test_manifests(latest: bytes, data: st.DataObject) -> None:
    with scratch() as folder:
        write_checkpoint(folder, RUN)
        tag = folder / "global_step6"
        whole = (tag / MANIFEST).read_bytes()
        (folder / LATEST).write_bytes(latest)
        (tag / MANIFEST).write_bytes(data.draw(damaged(whole)))
        with unchanged(folder):
            outcome(lambda: newest(folder), 4)
            manifest = outcome(lambda: read_manifest(tag), 4)
            if manifest is not None:
                outcome(lambda: check_sizes(tag, manifest), 4)
                for name, record in manifest.items():
                    outcome(lambda file=tag / name, record=record: check_content(file, record), 4)


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


@cache
def pickled() -> bytes:
    """A file of tensors as torch saves it."""
    buffer = io.BytesIO()
    torch.save({"module": TENSORS, "step": 3}, buffer)
    return buffer.getvalue()


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A safetensors file whose header is another."""
    whole = save(TENSORS)
    if draw(st.booleans()):
        return draw(damaged(whole))
    size = int.from_bytes(whole[:8], "little")
    header = json.dumps(draw(altered(json.loads(whole[8 : 8 + size])))).encode()
    promised = draw(st.sampled_from([len(header), len(header) + 1, 2**60, 0, 2**64 - 1]))
    return promised.to_bytes(8, "little") + header + whole[8 + size :]


@given(headers(), damaged(pickled()))
def test_files_of_tensors(tensors: bytes, pickle: bytes) -> None:
    with scratch() as folder:
        (folder / "x.safetensors").write_bytes(tensors)
        (folder / "mp_rank_00_model_states.pt").write_bytes(pickle)
        with unchanged(folder):
            outcome(lambda: read_tensors(folder / "x.safetensors"), 4)
            found = outcome(lambda: find(folder / "x.safetensors"), 4)
            outcome(lambda: read_config(found), 4)
            content = outcome(lambda: read_file(folder / "mp_rank_00_model_states.pt"), 4)
            outcome(lambda: check_identity(folder / "mp_rank_00_model_states.pt", content, 1), 4)


HF = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 20, "n_inner": None,
}  # fmt: skip
BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}, "added_tokens": []}


@given(altered(HF), altered(BPE))
def test_hugging_face_folders(config: object, tokenizer: object) -> None:
    with scratch() as folder:
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with unchanged(folder):
            model = outcome(lambda: config_of(read_json(folder / "config.json"), folder / "config.json"), 4)
            if model is not None:
                outcome(lambda: check_model(model, 30, "it"), 4)
            outcome(lambda: read_folder_tokenizer(folder, ModelConfig()), 3, 4)


JOB = {"--input": [["a.jsonl", 10, 20]], "--json-keys": ["text"]}


def journal_at(place: tuple[int, int]) -> bytes:
    """What preprocessing has written after three documents."""
    with scratch() as folder:
        journal = Journal(folder / "data.progress", JOB)
        journal.write(Milestone(place, {"text": Written(3, 40, 3)}, Summary(documents=3)))
        return journal.path.read_bytes()


JOURNAL = journal_at((0, 3))


@given(damaged(JOURNAL) | altered(json.loads(JOURNAL)).map(json.dumps).map(str.encode))
@example(journal_at((False, 3)))
def test_journals_of_preprocessing(content: bytes) -> None:
    with scratch() as folder:
        journal = Journal(folder / "data.progress", JOB)
        journal.path.write_bytes(content)
        with unchanged(folder):
            done = outcome(journal.read, 3)
            if done is not None:
                assert all(type(number) is int and number >= 0 for number in done.position)
                assert done.summary.documents >= 0
                for written in done.outputs.values():
                    assert all(type(number) is int and number >= 0 for number in written)


@cache
def images() -> list[bytes]:
    """A small image in each format."""
    files = []
    for kind in FORMATS:
        file = io.BytesIO()
        Image.effect_noise((9, 7), 50).convert("RGB").save(file, kind)
        files.append(file.getvalue())
    return files


@given(st.sampled_from(range(len(FORMATS))).flatmap(lambda kind: damaged(images()[kind])))
def test_images(content: bytes) -> None:
    image = outcome(lambda: decoded(content, 4), DataError.exit_code)
    assert image is None or image.shape == (4, 4, 3)
