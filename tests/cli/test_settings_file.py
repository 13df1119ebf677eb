"""``--config``: a settings file is the command line in another form, and a layer below it."""

from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA, SMALL, SMALL_T5, latest

from megatron.cli import parse_run, read_run
from megatron.cli.flags import layered
from megatron.cli.provided import Provided, Source
from megatron.cli.settings_file import settings_text
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.model.architectures import GPT2, T5
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.request import make_request as planned
from megatron.tools.verify.request import make_request as verified

ROOT = Path(__file__).resolve().parents[2]
LINES = "\n".join(
    f"{name}: {value}" for name, value in zip(SMALL.replace("--", "").split()[::2], SMALL.split()[1::2], strict=True)
)
"""SMALL as a settings file of 11 lines."""


@pytest.fixture
def run_of(tmp_path: Path):
    """The run of a settings file with ``text``, and of ``words`` after ``--config``."""

    def run(text: str, words: str = "", environ=CPU) -> RunConfig:
        (file := tmp_path / "run.yaml").write_text(text)
        return parse_run(["--config", str(file), *words.split()], {**environ, "WORLD_SIZE": "1"})

    return run


@pytest.fixture
def messages(run_of, tmp_path: Path):
    """What a settings file is refused with, without its folder."""

    def found(text: str, words: str = "") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            run_of(text, words)
        return [message.replace(f"{tmp_path}/", "") for message in caught.value.messages]

    return found


@pytest.mark.parametrize(
    "words",
    [
        "--lr 1e-4 --no-zero-reduce-scatter --zero-stage 1 --zero-reduce-bucket-size 5e6 --data-path 1 a 2 b",
        "--num-experts 4 --moe-layer-freq ([0]+[1])*2 --pre-tokens 8 --split 949,50,1 --swiglu",
        "--optimizer muon --muon-no-use-nesterov --window-size 8,0 --train-samples 64",
        "--model-preset llama3.2-1b --num-layers 4 --num-attention-heads 8",
        "t5 --no-geglu --vocab-extra-ids 50 --pipe-parallel-size 2 --pipeline-model-parallel-split-rank 1",
        "--save \U0001f469\u200d\U0001f4bb\x1b\xad",  # what a name on a command line may have
    ],
)
def test_the_file_that_a_run_keeps_repeats_it(tmp_path: Path, words: str) -> None:
    architecture, small = (T5, SMALL_T5) if words.startswith("t5") else (GPT2, SMALL)
    small = small.replace("--train-iters 100", "") if "--train-samples" in words else small
    environ = {**CPU, "WORLD_SIZE": "4"}
    run = read_run(latest(f"{small} {words.removeprefix('t5')}".split()), environ, architecture).checked()
    (file := tmp_path / "kept.yaml").write_text(settings_text(run))
    again = read_run(["--config", str(file)], environ, architecture).checked()
    assert again == run and again.settings == run.settings


def test_a_file_is_read_as_its_flags_are(run_of) -> None:
    flags = "--bf16 --loss-scale 1e4 --lr 1e-4 --no-zero-reduce-scatter --zero-stage 1 --split 9,1,0 --seed 18446744"
    file = """
# Comments, hyphens and underscores, aliases, and numbers as YAML 1.1 does not know them.
bf16: true
loss_scale: 1e4
lr: 1e-4   # not 0.001
zero_reduce_scatter: false
zero-stage: 1
split: 9,1,0
seed: 18446744
fp32_allreduce: False
no_bias_gelu_fusion: true
tensor_model_parallel_size: 1
data_path: [0.3, no, 0.7, "null"]
save: 'on'
"""
    small = "\n".join(line for line in LINES.splitlines() if not line.startswith(("lr:", "data-path:")))
    words = " ".join(latest(f"{SMALL} {flags} --save on --data-path 0.3 no 0.7 null".split()))
    assert run_of(small + file) == parse_run(words.split(), {**CPU, "WORLD_SIZE": "1"})
    assert run_of(f"{LINES}\nsave: a\u3000\xa0b").checkpoint.save == "a\u3000\xa0b"


def test_the_command_line_wins(run_of, tmp_path: Path) -> None:
    text = LINES + "\nbf16: true\n"
    run = run_of(text, "--lr 0.5 --train-samples 64 --no-bf16 --mock-data")
    assert (run.optim.lr, run.train.train_samples, run.train.train_iters) == (0.5, 64, 32)
    assert run.data.mock_data and not run.data.data_path and run.precision.dtype == "fp32"
    assert run_of(text, "--fp16", CUDA).precision.dtype == "fp16"


def test_later_layers_replace_values_and_what_they_exclude() -> None:
    def layer(**values) -> dict[str, Provided]:
        return {name: Provided(value, Source(f"--{name} {value}", "a file")) for name, value in values.items()}

    preset = layer(lr=1, bf16=True, train_iters=10, mock_data=True, zero_reduce_scatter=True)
    file = layer(lr=2, fp16=True, data_path=("a",))
    flags = layer(train_samples=5, zero_reduce_scatter=False, fp16=False, checkpoint_activations=False)
    values = {name: provided.value for name, provided in layered([preset, file, flags]).items()}
    # A DeepSpeed config could switch on fp16.
    assert values == {"lr": 2, "data_path": ("a",), "train_samples": 5, "zero_reduce_scatter": False, "fp16": False}
    assert layered([preset]) == preset and layered([]) == {}


SECTIONS = "sections are not supported: write each flag in its own line, not indented"
WRONG = {
    "hiden-size: 64": ", line 1: unknown flag --hiden-size: did you mean --hidden-size?",
    "batch-size: 2\nmicro-batch-size: 3": ", line 1: --batch-size 2 and run.yaml, line 2: --micro-batch-size 3 set the "
    "same thing: remove one",
    "lr: much": ", line 1: --lr much: must be a number",
    "num-layers: true": ", line 1: --num-layers needs a value, not true",
    "\"lr\": 1\n'lr': 2": ", line 2: lr was already given in line 1: remove one",
    "bf16: yes": ", line 1: --bf16 is a switch: write true or false",
    "lr: [1, 2]": ", line 1: --lr takes one value, not a list",
    "save: ~": ", line 1: save has no value: write one, or remove the line",
    "save: ''": ", line 1: --save '': must not be empty",
    'save: "a\\0b"': ", line 1: save: 'a\\x00b' has a character that is not printable: remove it",
    'save: "a\\ud800b"': ", line 1: save: 'a\\ud800b' has a character that is not printable: remove it",
    "data-path: [a, --save]": ", line 1: --data-path: '--save' looks like a flag; write a value",
    "model:\n  num-layers: 4": f", line 2: {SECTIONS}",
    "lr: 1\n---\nlr: 2": ", line 2: a second document begins here: write one",
    "lr=5: 3": ", line 1: 'lr=5' is not the name of a flag: write it without --, then a colon and a space",
    "- lr": ", line 1: not a setting: write lines of FLAG: VALUE",
    "# nothing\n": ": has no settings: write lines of FLAG: VALUE",
    "config: other.yaml": ", line 1: --config is for the command line: remove it",
    "[1]: 2": ", line 1: 'a list' is not the name of a flag: write it without --, then a colon and a space",
    "lr: &a [*a]": ", line 1: a list is the value of one flag: write FLAG: [VALUE, VALUE]",
    "lr: [[1]]": ", line 1: a list is the value of one flag: write FLAG: [VALUE, VALUE]",
    'save: !!python/object/apply:os.system ["touch a"]': ", line 1: the tag 'tag:yaml.org,2002:python/object/apply:"
    "os.system' is not supported: write the value without it",
    "data-path: [a, !env b]": ", line 1: the tag '!env' is not supported: write the value without it",
    "[" * 100_000: ": nested too deep: write lines of FLAG: VALUE",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_one_line_with_its_place(messages, text: str) -> None:
    words = SMALL.replace("--lr 0.001 ", "") if "must be more" in WRONG[text] else SMALL
    assert messages(text, words) == [f"run.yaml{WRONG[text]}"]


def test_text_that_is_not_yaml_is_one_line(messages, tmp_path: Path) -> None:
    for text in ("lr: 'a", "a: b: c", "\tlr: 1", "lr: 1\n - 2", "lr: {", "lr: *x", "lr: \x07", "%YAML 9.9\n---\nlr: 1"):
        (line,) = messages(text)
        assert line.startswith("run.yaml, line ") and "\n" not in line
    for size in (1 << 19, 1):
        (tmp_path / "bytes").write_bytes(b"\xff" * size)
        with pytest.raises(ConfigError, match="more than the 262,144 bytes|not UTF-8 at byte 0"):
            parse_run(["--config", str(tmp_path / "bytes")], CPU)


def test_classic_flags_have_their_outcome_in_a_file_too(run_of, messages) -> None:
    assert run_of(LINES + "\nrecompute_activations: true").activation.recompute_granularity == "selective"
    (line,) = messages("yaml-cfg: a", SMALL)
    assert line.startswith("run.yaml, line 1: --yaml-cfg: ")


@pytest.mark.parametrize("name", ["use-checkpoint-args", "use-flash-attn", "fp8-margin"])
def test_a_classic_switch_that_is_off_has_no_outcome(tmp_path: Path, name: str) -> None:
    (file := tmp_path / "run.yaml").write_text(f"{LINES}\n{name}: false\n")
    parsed = read_run(["--config", str(file)], {**CPU, "WORLD_SIZE": "1"})
    assert (parsed.problems, parsed.warnings) == ([], [])


def test_tools_that_describe_runs_read_it(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text(LINES + "\nglobal-batch-size: 8\nbf16: true\n")
    request = planned(["--config", str(file), "--lr", "2"], Machine(DEVICES["a100"], 2), 2)
    assert (request.given["hidden_size"].value, request.given["lr"].value) == (64, 2)
    words = verified(["--config", str(file)], 4, None, CPU).arguments
    assert "--config" not in words and words[words.index("--hidden-size") + 1] == "64" and "--bf16" in words


def test_the_example_is_a_legal_run() -> None:
    example = ROOT / "examples" / "run.yaml"
    parsed = read_run(["--config", str(example)], {**CUDA, "WORLD_SIZE": "8"})
    assert (parsed.problems, parsed.warnings) == ([], [])
    assert example.read_text().strip() in (ROOT / "docs" / "training.md").read_text()
