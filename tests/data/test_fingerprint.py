"""Hashes of data and tokenizer depend on the content alone."""

import shutil
from pathlib import Path

import pytest

from megatron.data.fingerprint import BLOCK, BLOCKS, data_hash, tokenizer_hash

LARGE = 3 * BLOCK * BLOCKS + 17


@pytest.fixture(params=[1000, LARGE])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A token file of some size, and an index."""
    (tmp_path / "text.bin").write_bytes(bytes(range(256)) * (request.param // 256) + bytes(request.param % 256))
    (tmp_path / "text.idx").write_bytes(b"index" * 30000)
    return str(tmp_path / "text")


def change(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_path_and_date_do_not_matter(prefix: str, tmp_path: Path) -> None:
    before = data_hash(prefix)
    for ending in ("bin", "idx"):
        shutil.copy(f"{prefix}.{ending}", tmp_path / f"copy.{ending}")
        (tmp_path / f"copy.{ending}").touch()
    assert data_hash(str(tmp_path / "copy")) == before and len(before) == 64


@pytest.mark.parametrize(("ending", "offset"), [("bin", 0), ("bin", -1), ("bin", 500), ("idx", 0), ("idx", 77777)])
def test_a_changed_byte_is_detected(prefix: str, ending: str, offset: int) -> None:
    before = data_hash(prefix)
    change(Path(f"{prefix}.{ending}"), offset)
    assert data_hash(prefix) != before


def test_a_longer_file_is_detected(prefix: str) -> None:
    before = data_hash(prefix)
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"x")
    assert data_hash(prefix) != before


@pytest.mark.parametrize("prefix", [LARGE], indirect=True)
def test_changes_between_the_blocks_of_a_large_file_are_not_detected(prefix: str) -> None:
    """The price of not reading all of it."""
    before = data_hash(prefix)
    change(Path(f"{prefix}.bin"), BLOCK + 10)
    assert data_hash(prefix) == before


def test_a_tokenizer_is_its_kind_and_its_files(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text("{}")
    merges.write_text("a b")
    before = tokenizer_hash("BPE", str(vocab), str(merges))
    assert before == tokenizer_hash("BPE", str(vocab), str(merges))
    others = {tokenizer_hash("BPE", str(vocab), None), tokenizer_hash("Words", str(vocab), str(merges))}
    merges.write_text("a c")
    others.add(tokenizer_hash("BPE", str(vocab), str(merges)))
    assert len(others | {before}) == 4
