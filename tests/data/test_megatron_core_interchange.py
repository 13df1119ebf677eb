"""Data sets go to and fro between this program and NVIDIA's megatron-core, unchanged.

Both packages are called ``megatron``, so the other one runs in a process that does not see ours.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.preprocess.image_records import read_records

DOCUMENTS = [[1, 2, 3], [65000, 0], [7] * 300]

WRITE = """
import json, sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
prefix, dtype, documents = sys.argv[1], getattr(numpy, sys.argv[2]), json.loads(sys.argv[3])
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
for document in documents:
    builder.add_item(torch.tensor(document))
    builder.end_document()
builder.finalize(prefix + ".idx")
"""

MULTIMODAL = """
import json, sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
prefix, text, images = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.int32, multimodal=True)
for image in images:  # as its tools/preprocess_mmdata.py: the first number is how many zeros are at the end
    content = bytearray(open(image, "rb").read())
    padding = (4 - len(content) % 4) % 4
    content.extend([0] * padding)
    builder.add_item(torch.IntTensor(text))
    builder.add_item(torch.from_numpy(numpy.insert(numpy.frombuffer(content, dtype=numpy.int32), 0, padding)), 1)
    builder.end_document()
builder.finalize(prefix + ".idx")
"""

READ = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset(sys.argv[1])
print(json.dumps({
    "documents": [dataset[n].tolist() for n in range(len(dataset))],
    "doc_idx": dataset.document_indices.tolist(),
    "dtype": dataset.index.dtype.__name__,
}))
"""

SPANS = """
import json, sys
from types import SimpleNamespace
import numpy
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
pieces, texts, target, seed = json.loads(sys.argv[1])
names = [*pieces, "[BOS]", "[EOS]"]
tokenizer = SimpleNamespace(
    cls=2, sep=3, mask=4, bos=len(pieces), eos=len(pieces) + 1, inv_vocab=dict(enumerate(names)),
    additional_special_tokens_ids=[len(names) + n for n in range(20)],
)
dataset = object.__new__(T5MaskedWordPieceDataset)
dataset.dataset = [numpy.array(text) for text in texts]
dataset.sample_index, dataset._pad_token_id = [(n, n + 1, target) for n in range(len(texts))], 0
dataset.config = SimpleNamespace(
    tokenizer=tokenizer, random_seed=seed, sequence_length=40, sequence_length_encoder=40, sequence_length_decoder=24,
    masking_probability=0.15, masking_max_ngram=10, masking_do_full_word=True, masking_do_permutation=False,
    masking_use_longer_ngrams=False, masking_use_geometric_distribution=True,
)
samples = [dataset[n] for n in range(len(texts))]
print(json.dumps([[sample[part].tolist() for part in ("text_enc", "text_dec", "labels")] for sample in samples]))
"""


SERVE = """
import contextlib, io, json, sys
with contextlib.redirect_stdout(sys.stderr):
    import megatron.core.datasets.indexed_dataset, megatron.core.datasets.t5_dataset
for line in sys.stdin:
    script, *sys.argv[1:] = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    print(json.dumps(printed.getvalue()), flush=True)
"""
"""Runs one script after another where megatron-core has been imported, which takes seconds."""


@pytest.fixture(scope="module")
def megatron_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """``megatron_core(script, *arguments)``: run a script that imports megatron-core; what it prints."""
    folder = tmp_path_factory.mktemp("megatron-core")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*install, "megatron-core==0.16.1"], check=True)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVE],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def run(*words: str) -> str:
        requests.write(json.dumps(words) + "\n")
        requests.flush()
        answer = answers.readline()
        assert answer, "the script failed: its traceback is above"
        return json.loads(answer)

    yield run
    process.communicate()


@pytest.mark.parametrize(("name", "dtype"), [("uint16", "u2"), ("int32", "i4")])
def test_files_are_the_same_bytes(
    tmp_path: Path, megatron_core: Callable[..., str], write_dataset: Callable[..., str], name: str, dtype: str
) -> None:
    theirs = str(tmp_path / "theirs")
    megatron_core(WRITE, theirs, name, json.dumps(DOCUMENTS))
    dataset = IndexedDataset(theirs)
    assert [dataset.get(n).tolist() for n in range(3)] == DOCUMENTS
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3]
    ours = write_dataset(DOCUMENTS, dtype, "ours")
    for ending in ("bin", "idx"):
        assert Path(f"{ours}.{ending}").read_bytes() == Path(f"{theirs}.{ending}").read_bytes()


def test_images_of_a_multimodal_data_set_are_the_files_that_it_was_made_of(
    tmp_path: Path, megatron_core: Callable[..., str]
) -> None:
    """Whatever is left of their lengths, divided by four."""
    files = [tmp_path / f"{length}.png" for length in (8, 9, 10, 11)]
    for number, file in enumerate(files):
        file.write_bytes(b"\x89PNG" + bytes(range(number + 4)))
    megatron_core(MULTIMODAL, str(tmp_path / "theirs"), "[5, 6, 7]", *map(str, files))
    assert IndexedDataset(tmp_path / "theirs").modes.tolist() == [0, 1] * 4
    records = list(read_records(tmp_path / "theirs.idx"))
    assert [record.tokens for record in records] == [[5, 6, 7]] * 4
    assert [record.content["image"] for record in records] == [[file.read_bytes()] for file in files]


def test_megatron_core_reads_ours(megatron_core: Callable[..., str], write_dataset: Callable[..., str]) -> None:
    found = json.loads(megatron_core(READ, write_dataset(DOCUMENTS)).splitlines()[-1])
    assert found == {"documents": DOCUMENTS, "doc_idx": [0, 1, 2, 3], "dtype": "uint16"}


def test_spans_of_t5_are_those_of_megatron_core(megatron_core: Callable[..., str]):
    """For the same texts and seed: the spans, and what encoder and decoder read."""
    from megatron.config import DataConfig
    from megatron.data.t5_dataset import corrupted
    from megatron.tokenizer import SpanVocabulary
    from megatron.tokenizer.words import SPECIAL

    chance, seed, target = np.random.RandomState(1), 1234, 38
    pieces = [*SPECIAL, *(f"w{n}" for n in range(30)), *(f"##{n}" for n in range(9))]
    texts = [chance.randint(5, len(pieces), chance.randint(3, target + 1)).tolist() for _ in range(80)]
    expected = json.loads(megatron_core(SPANS, json.dumps([pieces, texts, target, seed])))
    first = len(pieces) + 2
    continues = np.array([piece.startswith("##") for piece in pieces])
    vocabulary = SpanVocabulary(
        first + 20, len(pieces), len(pieces), len(pieces) + 1, tuple(range(first, first + 20)), (2, 3), continues
    )
    for number, (text, parts) in enumerate(zip(texts, expected, strict=True)):
        random = np.random.RandomState((seed + number) % 2**32)
        sample = corrupted(
            np.array(text), target, vocabulary, DataConfig(seq_length=40, decoder_seq_length=24, mask_prob=0.15), random
        )
        encoder, decoder, labels = np.split(sample, [40, 64])
        assert [encoder.clip(0).tolist(), decoder.tolist(), labels.tolist()] == parts
