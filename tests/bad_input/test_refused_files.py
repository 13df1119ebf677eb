"""Data, vocabularies and outputs that are missing, damaged or not accessible: one line each before torch is used."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.refusals import launched, refusal

Damage = Callable[[Path], object]
IDX, BIN, VOCAB = "tiny_text_document.idx", "tiny_text_document.bin", "vocab.json"


def whole(place: Path) -> None:
    """No damage."""


def removed(name: str) -> Damage:
    return lambda place: (place / name).unlink()


def cut(name: str, size: int) -> Damage:
    return lambda place: os.truncate(place / name, size)


def locked(name: str, mode: int = 0) -> Damage:
    return lambda place: (place / name).chmod(mode)


def written(name: str, text: str) -> Damage:
    return lambda place: (place / name).write_text(text)


DATA: dict[str, tuple[Damage, str, list[str]]] = {
    "the prefix that preprocessing was given": (
        whole,
        "--data-path tiny",
        ["no data set at tiny: tiny.bin and tiny.idx missing (did you mean tiny_text_document?)"],
    ),
    "a truncated index": (
        cut(IDX, 500),
        "",
        [
            "tiny_text_document.idx is truncated: it ends at offset 500, its header promises 4042 bytes "
            "(200 sequences, 201 document bounds)"
        ],
    ),
    "tokens shorter than their index": (
        cut(BIN, 100),
        "",
        ["tiny_text_document.bin is truncated: it has 100 bytes, its index says 6875 tokens of 2 bytes, 13750 in all"],
    ),
    "tokens that may not be read": (locked(BIN), "", ["cannot read tiny_text_document.bin: Permission denied"]),
    "a corpus too small for one sample": (
        whole,
        "--seq-length 9000 --max-position-embeddings 9000 --split 1",
        [
            'the training split of tiny_text_document by --split "1" (documents 0 to 199 of 200: 6875 tokens) holds no '
            "sample of 9000+1 tokens: use a smaller --seq-length, another --split or more text"
        ],
    ),
    "a name that is too long": (whole, f"--data-path {'x' * 300}", [f"{'x' * 300}.bin: File name too long"]),
    "a folder for the vocabulary": (
        whole,
        "--vocab-file ck",
        ["--vocab-file ck: is a folder (tools/train_tokenizer.py makes one)"],
    ),
    "a tokens file for the vocabulary": (
        whole,
        f"--vocab-file {IDX}",
        ["tiny_text_document.idx: byte 18 is not UTF-8; is this the right file?"],
    ),
    "everything at once": (
        removed(VOCAB),
        "--data-path none",
        [
            "no data set at none: none.bin and none.idx missing (tools/preprocess_data.py makes one)",
            "--vocab-file vocab.json: no such file (tools/train_tokenizer.py makes one)",
        ],
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_are_refused(place: Path, case: str) -> None:
    damage, words, lines = DATA[case]
    damage(place)
    assert refusal(place, words) == (3, lines)


OUTPUTS: dict[str, tuple[Damage, str, list[str]]] = {
    "a file where a folder should be": (
        whole,
        "--save vocab.json",
        ["--save vocab.json: {place}/vocab.json is not a folder; name another folder, or move it away"],
    ),
    "a folder that may not be written to": (
        locked("ck", 0o555),
        "--save ck",
        ["--save ck: no permission to write in {place}/ck; name another folder, or change its permissions"],
    ),
    "a folder for the metrics": (whole, "--metrics-file ck", ["--metrics-file ck is a folder; name a file"]),
    "metrics that may not be written": (
        locked("ck/latest", 0o444),
        "--metrics-file ck/latest",
        ["--metrics-file ck/latest: no permission to write it; name another file, or change its permissions"],
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_are_refused(place: Path, case: str) -> None:
    damage, words, lines = OUTPUTS[case]
    damage(place)
    assert refusal(place, words) == (2, [line.format(place=place) for line in lines])


def test_settings_are_checked_before_data_and_checkpoints(place: Path) -> None:
    (place / "vocab.json").write_text("{}")
    code, lines = refusal(place, f"--save {BIN} --data-path none --load none", launched(0, 2))
    assert code == 2
    assert [line.split(":")[0] for line in lines] == [
        f"--save {BIN}",
        "no data set at none",
        "vocab.json",  # without <unk>
        "vocab.json",  # without <|endoftext|>
    ]
