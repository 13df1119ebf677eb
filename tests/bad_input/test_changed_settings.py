"""A resume with other settings: each is named with both values and needs --override."""

import json
import shutil
from pathlib import Path

import pytest
from support.programs import Programs, read_metrics
from support.refusals import COMMAND, launched, refusal

SAME = "--load ck --save ck"
ADVICE = "give --override to continue with another value, or --finetune to start a new run"

FOLLOWS = (
    "in ck/global_step2 (by default that of --train-iters; --lr-decay-iters 4 keeps the old value)",
    "in ck/global_step2 (--warmup is a fraction of the decay; --lr-warmup-iters 0 keeps the old value)",
)

# Changed setting: flags, and for each line the setting with its value and the checkpoint's.
CHANGED: dict[str, tuple[str, list[tuple[str, object, object]]]] = {
    "seed": ("--seed 99", [("--seed", 99, 1234)]),
    "batch": ("--batch-size 4", [("--global-batch-size", 4, 2)]),
    "split": ("--split 9,1,0", [("--split", "9,1,0", "8,1,1")]),
    "documents": (
        "--eod-mask-loss --reset-position-ids",
        [("--reset-position-ids", True, False), ("--eod-mask-loss", True, False)],
    ),
    "regularization": (
        "--hidden-dropout 0 --weight-decay 0.1",
        [("--hidden-dropout", 0.0, 0.1), ("--weight-decay", 0.1, 0.01)],
    ),
    "learning rate": (
        "--lr 5e-3 --min-lr 0 --lr-decay-style linear",
        [("--lr", 0.005, 0.001), ("--min-lr", 0.0, 0.0001), ("--lr-decay-style", "linear", "cosine")],
    ),
    "a longer run, and so a slower decay": (
        "--train-iters 20",
        [
            ("--lr-decay-iters", 20, f"4 {FOLLOWS[0]}"),
            ("--lr-warmup-iters", 4, f"0 {FOLLOWS[1]}"),
        ],
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_setting_is_refused(place: Path, case: str) -> None:
    words, changes = CHANGED[case]
    saved = {
        name: theirs if str(theirs).endswith(")") else f"{theirs} in ck/global_step2" for name, _, theirs in changes
    }
    lines = [f"{name} is {ours}, but {saved[name]}: {ADVICE}" for name, ours, _ in changes]
    assert refusal(place, f"{SAME} {words}") == (4, lines)


def test_a_shorter_sequence_with_as_many_positions(place: Path) -> None:
    line = f"--seq-length is 16, but 32 in ck/global_step2: {ADVICE}"
    assert refusal(place, f"{SAME} --seq-length 16 --max-position-embeddings 32") == (4, [line])


def test_changed_tokens(place: Path) -> None:
    tokens = bytearray((place / "tiny_text_document.bin").read_bytes())
    tokens[0:2], tokens[2:4] = tokens[2:4], tokens[0:2]
    (place / "tiny_text_document.bin").write_bytes(tokens)
    code, (line,) = refusal(place, SAME)
    assert code == 4 and line.startswith("the content of --data-path is ") and line.endswith(ADVICE)


def test_a_tokenizer_of_the_same_size(place: Path) -> None:
    vocabulary = json.loads((place / "vocab.json").read_text())
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    (place / "vocab.json").write_text(json.dumps(vocabulary))
    code, (line,) = refusal(place, SAME)
    assert code == 4 and line.startswith("the tokenizer's content is ") and line.endswith(ADVICE)


def test_layout_and_settings_may_change_together(place: Path) -> None:
    """The layout may change, but the model and the optimization may not."""
    words = f"{SAME} --model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1 --seed 99"
    line = f"--seed is 99, but 1234 in ck/global_step2: {ADVICE}"
    assert refusal(place, words, launched(0, 4)) == (4, [line])


def test_nvme_is_not_converted(place: Path) -> None:
    (place / "nvme").mkdir()
    words = f"{SAME} --zero-stage 3 --offload-optimizer nvme --nvme-path nvme"
    line = "in ck/global_step2: state on NVMe is resumed on the layout it was saved on"
    assert refusal(place, words) == (
        4,
        [f"--zero-stage is 3, but 0 {line}", f"--offload-optimizer is nvme, but none {line}"],
    )


def test_moved_data_are_the_same(programs: Programs, place: Path) -> None:
    (place / "elsewhere").mkdir()
    for ending in ("bin", "idx"):
        shutil.move(place / f"tiny_text_document.{ending}", place / "elsewhere" / f"text.{ending}")
    output = _start(programs, place, f"{SAME} --data-path elsewhere/text --exit-interval 3")
    assert "resuming after iteration 2" in output and "--override" not in output


def test_override_takes_all_of_the_command_line(programs: Programs, place: Path) -> None:
    """Samples continue at the same position with another batch size; the new learning rate and decay are used."""
    words = "--override --batch-size 4 --lr 5e-3 --weight-decay 0.5 --exit-interval 3 --metrics-file metrics"
    output = _start(programs, place, f"{SAME} {words}")
    assert "> --override: --global-batch-size is 4, but 2 in ck/global_step2" in output
    assert "> --override: --lr is 0.005, but 0.001 in ck/global_step2" in output
    third = next(line for line in read_metrics(place / "metrics") if "lm_loss" in line)
    assert (third["iteration"], third["consumed_samples"]) == (3, 2 * 2 + 4)
    assert third["learning_rate"] > 1e-3
    description = json.loads((place / "ck" / "global_step3" / "run.json").read_text())
    assert description["consumed_samples"] == 8 and description["settings"]["--weight-decay"] == 0.5
    import torch

    state = torch.load(place / "ck" / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.5, 0.0]


def _start(programs: Programs, place: Path, words: str) -> str:
    command = [programs.root / "pretrain_gpt2.py", *COMMAND, *words.split()]
    return programs.run("env", "-C", place, "python", *command).ok().output
