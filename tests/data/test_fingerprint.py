"""Hashes of data and tokenizer depend only on the content."""

import hashlib
import shutil
from pathlib import Path

import pytest

from megatron.data import fingerprint
from megatron.data.fingerprint import BLOCK, BLOCKS, blend_hash, data_hash, tokenizer_hash

LARGE = 3 * BLOCK * BLOCKS + 17


def change(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_hashes_of_blends_stay_as_they_are(tmp_path: Path) -> None:
    """Checkpoints have them. That of a run with ``--train-data-path`` for one data set is not the data set's."""
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        for ending in ("bin", "idx"):
            Path(f"{prefix}.{ending}").write_bytes(f"{prefix[-1]}.{ending}".encode())
    one, other = map(data_hash, prefixes)
    for contents, hashes in (
        (((prefixes[0],), (), ()), [[one], [], []]),
        ((tuple(prefixes),), [[one, other]]),
        (((prefixes[0],), (prefixes[1],), ()), [[one], [other], []]),
    ):
        assert blend_hash(contents) == hashlib.sha256(repr(hashes).encode()).hexdigest()
    assert blend_hash(((prefixes[0],),)) == one


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_hash_follows_the_content_and_neither_path_nor_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    (tmp_path / "text.bin").write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    (tmp_path / "text.idx").write_bytes(b"index" * 30000)
    before, copy = data_hash(str(tmp_path / "text")), str(tmp_path / "copy")
    monkeypatch.setattr(fingerprint, "PIECE", 1001)
    for ending in ("bin", "idx"):
        shutil.copy(tmp_path / f"text.{ending}", f"{copy}.{ending}")
        Path(f"{copy}.{ending}").touch()
    assert data_hash(copy) == before and len(before) == 64
    for ending, offset in (("bin", 0), ("bin", -1), ("bin", 500), ("idx", 0), ("idx", 77777)):
        change(Path(f"{copy}.{ending}"), offset)
        assert data_hash(copy) != before, (ending, offset)
        change(Path(f"{copy}.{ending}"), offset)
    if size == LARGE:
        change(Path(f"{copy}.bin"), BLOCK + 10)
    assert data_hash(copy) == before, "what is between the blocks of a large file is not read"
    with open(f"{copy}.bin", "ab") as file:
        file.write(b"x")
    assert data_hash(copy) != before


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
