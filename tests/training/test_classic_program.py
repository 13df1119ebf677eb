"""``megatron.training.pretrain``: a program in the shape of Megatron-LM's on layouts; mistakes are one line."""

from pathlib import Path

import pytest
from support.programs import Programs, read_metrics

PROGRAM = "examples/pretrain_gpt_megatron.py"
SIZES = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --batch-size 2 --global-batch-size 8"
    " --lr 1e-2 --train-iters 4 --eval-interval 4 --eval-iters 1 --log-interval 1 --vocab-rows 128 --split 8,1,1"
).split()


@pytest.fixture
def data_path(programs: Programs) -> list[str]:
    words = [str(word) for word in programs.data_arguments]
    return words[words.index("--data-path") :][:2]


def test_layouts_agree(programs: Programs, tmp_path: Path, data_path: list[str]) -> None:
    losses = {}
    layouts = {1: "", 4: "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"}
    for processes, layout in layouts.items():
        file = tmp_path / f"{processes}"
        programs.warm(processes, PROGRAM, *SIZES, *data_path, *layout.split(), "--metrics-file", file).ok()
        kinds = ("lm_loss", "validation_loss")
        losses[processes] = {
            (kind, line["iteration"]): line[kind] for line in read_metrics(file) for kind in kinds if kind in line
        }
    assert losses[1]["lm_loss", 4] < losses[1]["lm_loss", 1] and len(losses[1]) >= 5
    assert losses[4] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("return GPT(pre_process", "return GTP(pre_process", "model_provider: NameError: name 'GTP' is not defined"),
        ("model(tokens, labels), partial", "model(tokens), partial", "forward_step_func: TypeError: GPT.forward()"),
        (
            "losses.float() * loss_mask",
            "losses.flot() * loss_mask",
            "loss_func: AttributeError: 'Tensor' object",
        ),
        ("data_prefix=args.data_path", "data_prefix=args.data_paths", "train_valid_test_datasets_provider: Attribute"),
        ("        forward_step,\n", "", "pretrain: forward_step_func is missing"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(
    programs: Programs, tmp_path: Path, data_path: list[str], before: str, after: str, line: str
) -> None:
    text = (programs.root / PROGRAM).read_text()
    assert text.count(before) == 1
    program = tmp_path / "program.py"
    program.write_text(text.replace(before, after).replace("Path(__file__)", f"Path({str(programs.root / PROGRAM)!r})"))
    finished = programs.warm(1, program, *SIZES, *data_path)
    assert finished.returncode == 2 and line in finished.output and "Traceback" not in finished.output
    if "missing" not in line:
        number = 1 + text[: text.index(before)].count("\n")
        assert f"({program}:{number})" in finished.output
