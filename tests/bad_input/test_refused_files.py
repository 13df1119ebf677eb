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


# Problem: damage, flags, exit code, and what each line says.
CASES: dict[str, tuple[Damage, str, int, list[str]]] = {
    "the prefix that preprocessing was given": (whole, "--data-path tiny", 3, ["did you mean tiny_text_document?"]),
    "a truncated index": (
        cut(IDX, 500),
        "",
        3,
        [f"{IDX} is truncated: it ends at offset 500, its header promises 4042"],
    ),
    "a pointer of Git LFS": (
        written(IDX, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"),
        "",
        3,
        [f"cannot read {IDX}: a pointer of Git LFS, not the file itself: git lfs pull replaces it"],
    ),
    "a model of the hub": (
        whole,
        "--load-hf me/gpt",
        2,
        ["--load-hf me/gpt: no such folder; models are not downloaded: give a local folder"],
    ),
    "a model's name that no folder can have": (
        whole,
        f"--load-hf {'x' * 300}",
        2,
        [": no such folder; models are not"],
    ),
    "tokens shorter than their index": (
        cut(BIN, 100),
        "",
        3,
        [f"{BIN} is truncated: it has 100 bytes, its index says"],
    ),
    "a corpus too small for one sample": (
        whole,
        "--seq-length 9000 --max-position-embeddings 9000 --split 1",
        3,
        ["(documents 0 to 199 of 200: 6875 tokens) holds no sample of 9000+1 tokens: use a smaller --seq-length"],
    ),
    "a folder for the vocabulary": (whole, "--vocab-file ck", 3, ["--vocab-file ck: is a folder"]),
    "a tokens file for the vocabulary": (whole, f"--vocab-file {IDX}", 3, [f"{IDX}: byte 18 is not UTF-8"]),
    "everything at once": (
        removed(VOCAB),
        "--data-path none",
        3,
        ["no data set at none: none.bin and none.idx missing", "--vocab-file vocab.json: no such file"],
    ),
    "a file where a folder should be": (whole, "--save vocab.json", 2, ["{place}/vocab.json is not a folder; name"]),
    "a folder that may not be written to": (
        locked("ck", 0o555),
        "--save ck",
        2,
        ["--save ck: no permission to write in {place}/ck; name another folder, or change its permissions"],
    ),
    "a checkpoint to save into": (
        whole,
        "--save ck/global_step1",
        2,
        ["--save ck/global_step1: {place}/ck/global_step1 is a checkpoint, and is refused with other files in it"],
    ),
    "tokens to append metrics to": (
        whole,
        f"--metrics-file {BIN}",
        2,
        [f"--metrics-file {BIN} holds something else; name another file"],
    ),
    "metrics where nothing may be written": (
        locked("ck", 0o555),
        "--metrics-file ck/new",
        2,
        ["--metrics-file ck/new: no permission to write in {place}/ck; name another folder, or change"],
    ),
    "metrics in the place of checkpoints": (
        whole,
        "--metrics-file new --save new",
        2,
        ["--metrics-file new is what --save new writes; name another file"],
    ),
    "metrics in the place of TensorBoard's": (
        whole,
        "--metrics-file ./a/../new --tensorboard-dir new",
        2,
        ["--metrics-file ./a/../new is what --tensorboard-dir new writes; name another file"],
    ),
    "metrics in the place of the name of the newest checkpoint": (
        whole,
        "--metrics-file new/latest --save new",
        2,
        ["--metrics-file new/latest is what --save new writes; name another file"],
    ),
    "metrics in the place of a trace": (
        whole,
        "--metrics-file new/trace.json --trace new",
        2,
        ["--metrics-file new/trace.json is what --trace new writes; name another file"],
    ),
    "metrics as a folder of the profile": (
        whole,
        "--metrics-file new --profile-dir new/inside --profile-steps 1:2",
        2,
        ["--metrics-file new is what --profile-dir new/inside writes; name another file"],
    ),
    "metrics in the place of the FLOPs profile": (
        whole,
        "--metrics-file new/flops-profile.txt --profile-dir new --flops-profile-step 2",
        2,
        ["is what flops_profiler.output_file new/flops-profile.txt writes; name another file"],
    ),
    "a folder for the metrics": (whole, "--metrics-file ck", 2, ["--metrics-file ck is a folder; name a file"]),
    "a slash after the metrics": (whole, "--metrics-file new/", 2, ["--metrics-file new/ is a folder; name a file"]),
    "metrics that may not be written": (
        locked("ck/latest", 0o444),
        "--metrics-file ck/latest",
        2,
        ["--metrics-file ck/latest: no permission to write it; name another file, or change its permissions"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_files_are_refused(place: Path, case: str) -> None:
    damage, words, expected, parts = CASES[case]
    damage(place)
    code, lines = refusal(place, words)
    assert code == expected
    assert all(part.format(place=place) in line for part, line in zip(parts, lines, strict=True)), lines


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
