"""A resume with other settings: each is named with both values and needs --override."""

import json
import shutil
from pathlib import Path

import pytest
from support.command_lines import parse
from support.programs import Programs, read_metrics
from support.refusals import COMMAND, launched, refusal

from megatron.checkpoint.run_file import settings_of

SAME = "--load ck --save ck"
ADVICE = "give --override to continue with another value, or --finetune to start a new run"

SEVERAL = """
    --seed 99 --batch-size 4 --split 9,1,0 --seq-length 16 --max-position-embeddings 32 --reset-position-ids
    --eod-mask-loss --hidden-dropout 0 --weight-decay 0.1 --lr 5e-3 --min-lr 0 --lr-decay-style linear
    --pre-tokens 8 --openai-gelu --layernorm-epsilon 1e-3 --apply-residual-connection-post-layernorm
    --model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1
"""
"""The layout may change; the model and the optimization may not."""
CHANGED = {
    "--seq-length": (16, 32),
    "--reset-position-ids": (True, False),
    "--eod-mask-loss": (True, False),
    "--split": ("9,1,0", "8,1,1"),
    "--seed": (99, 1234),
    "--global-batch-size": (4, 2),
    "--hidden-dropout": (0.0, 0.1),
    "--lr": (0.005, 0.001),
    "--min-lr": (0.0, 0.0001),
    "--lr-decay-style": ("linear", "cosine"),
    "--weight-decay": (0.1, 0.01),
    "--pre-tokens": (8, 65536),
    "--openai-gelu": (True, False),
    "--layernorm-epsilon": (0.001, 1e-05),
    "--apply-residual-connection-post-layernorm": (True, False),
}
"""The value of the command line, and the checkpoint's."""


def test_changed_settings_are_refused_together(place: Path) -> None:
    code, lines = refusal(place, f"{SAME} {SEVERAL}", launched(0, 4))
    assert code == 4
    assert sorted(lines) == sorted(
        f"{name} is {ours}, but {theirs} in ck/global_step2: {ADVICE}" for name, (ours, theirs) in CHANGED.items()
    )


@pytest.mark.parametrize(
    "words",
    [
        "--lora-rank 2 --lora-dropout 0.5",
        "llava --image-token-id 61",
        "llava --vision-layernorm-epsilon 1e-3",
        "llava --vision-feature-layer -1",
        "llava --vision-feature-select-strategy full",
        "llava --vision-lr-mult 0.5",
        "llava --projector-lr-mult 0.5",
    ],
)
def test_settings_without_weights_are_compared(words: str) -> None:
    *base, flag, _ = words.split()
    before, after = settings_of(parse(" ".join(base))), settings_of(parse(words))
    assert [name for name in after if after[name] != before[name]] == [flag]


def test_a_longer_run_changes_what_follows_from_its_length(place: Path) -> None:
    decay = "(by default that of --train-iters; --lr-decay-iters 4 keeps the old value)"
    warmup = "(--warmup is a fraction of the decay; --lr-warmup-iters 0 keeps the old value)"
    assert refusal(place, f"{SAME} --train-iters 20") == (
        4,
        [
            f"--lr-decay-iters is 20, but 4 in ck/global_step2 {decay}: {ADVICE}",
            f"--lr-warmup-iters is 4, but 0 in ck/global_step2 {warmup}: {ADVICE}",
        ],
    )


def test_an_update_rule_that_only_a_json_has(place: Path) -> None:
    adam = {"type": "Adam", "params": {"adam_w_mode": False}}
    (place / "ds.json").write_text(json.dumps({"optimizer": adam}))
    expected = 4, [f"adam_w_mode is False, but True in ck/global_step2: {ADVICE}"]
    assert refusal(place, f"{SAME} --deepspeed-config ds.json") == expected
    (place / "ds.json").write_text(json.dumps({"optimizer": adam | {"type": "AdamW"}}))  # ignores it
    _, (line,) = refusal(place, f"{SAME} --deepspeed-config ds.json --seed 99")
    assert line.startswith("--seed is 99")


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


def test_nvme_is_not_converted(place: Path) -> None:
    (place / "nvme").mkdir()
    words = f"{SAME} --zero-stage 3 --offload-optimizer nvme --nvme-path nvme"
    line = "in ck/global_step2: state on NVMe is resumed on the layout it was saved on"
    assert refusal(place, words) == (
        4,
        [f"--zero-stage is 3, but 0 {line}", f"--offload-optimizer is nvme, but none {line}"],
    )


def test_adafactor_stays_on_its_layout(place: Path) -> None:
    words = f"{SAME} --optimizer adafactor --context-parallel-size 2"
    code, lines = refusal(place, words, launched(0, 2))
    assert code == 4 and lines[0].startswith("ck/global_step2 was saved on another layout: Adafactor")


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
    return Programs(place, programs.folder).warm(1, *command).ok().output
