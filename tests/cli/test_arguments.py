"""Command lines: every classic argument, every alias, and mistakes."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_lines import CPU, SMALL, complaints, parse

from megatron.cli import parse_run, read_run
from megatron.cli.classic_flags import outcome_of
from megatron.cli.parser import build_parser
from megatron.cli.presets import PRESETS
from megatron.common.errors import ConfigError
from megatron.config import flag_fields
from megatron.config.fields import flag_name, flag_of
from megatron.model.architectures import ARCHITECTURES
from megatron.model.partition import layers_per_chunk

CLASSIC = """
num-layers num-unique-layers param-sharing-style hidden-size num-attention-heads max-position-embeddings
make-vocab-size-divisible-by layernorm-epsilon apply-residual-connection-post-layernorm openai-gelu onnx-safe
attention-dropout hidden-dropout weight-decay clip-grad adam-beta1 adam-beta2 adam-eps
batch-size gas checkpoint-activations distribute-checkpointed-activations checkpoint-num-layers train-iters
log-interval exit-interval tensorboard-dir scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion
bias-gelu-fusion bias-dropout-fusion cpu-optimizer cpu_torch_adam
seed init-method-std
lr lr-decay-style lr-decay-iters min-lr warmup override-lr-scheduler use-checkpoint-lr-scheduler
save save-interval no-save-optim no-save-rng load no-load-optim no-load-rng finetune
fp16 apply-query-key-layer-scaling attention-softmax-in-fp32 fp32-allreduce hysteresis loss-scale loss-scale-window
min-scale fp16-lm-cross-entropy
model-parallel-size pipe-parallel-size distributed-backend DDP-impl local_rank lazy-mpu-init use-cpu-initialization
eval-iters eval-interval
data-path split vocab-file merge-file seq-length mask-prob short-seq-prob mmap-warmup num-workers tokenizer-type
data-impl reset-position-ids reset-attention-mask eod-mask-loss
adlr-autoresume adlr-autoresume-interval
zero-stage zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size
deepspeed-activation-checkpointing partition-activations contigious-checkpointing checkpoint-in-cpu
synchronize-each-layer profile-backward
""".split()


def test_train_samples_are_counted_in_whole_iterations() -> None:
    words = SMALL.replace("--train-iters 100", "--train-samples 41").split()
    run = parse_run(words, CPU)
    assert (run.train.train_samples, run.train.train_iters) == (41, 20)
    assert "exclude each other" in complaints("--train-samples 41")[0]
    with pytest.raises(ConfigError, match="--train-samples 1 is less than one global batch of 2"):
        parse_run(SMALL.replace("--train-iters 100", "--train-samples 1").split(), CPU)


def test_missing_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([], CPU)
    required = "num-layers hidden-size num-attention-heads seq-length lr train-iters batch-size data-path"
    names = {f"--{name}" for name in (*required.split(), "vocab-file", "merge-file")}
    assert {message.split()[0] for message in caught.value.messages} == names


def test_a_replaced_value_is_announced() -> None:
    words = "--local_rank 3 --local_rank 3 --lr 0.2 --data-path 1 a 2 b"
    parsed = read_run(f"{SMALL} {words}".split(), CPU)
    assert (parsed.run.optim.lr, parsed.run.data.data_path) == (0.2, ("1", "a", "2", "b"))
    assert parsed.warnings == [
        "--lr 0.001 has no effect: --lr 0.2 follows it",
        "--data-path corpus has no effect: --data-path 1 a 2 b follows it",
    ]


def test_classic_arguments_are_flags_or_have_an_outcome() -> None:
    assert len(CLASSIC) == len(set(CLASSIC)) == 95
    programs = [build_parser(architecture) for architecture in ARCHITECTURES.values()]
    flags = {name for parser in programs for action in parser._actions for name in action.option_strings}
    for name in CLASSIC:
        name = name.replace("_", "-")
        assert ("--" + name in flags) != (outcome_of(name, ["local"]) is not None), name


@pytest.mark.parametrize(
    "words, message",
    [
        ("--hiden-size 64", "unknown flag --hiden-size: did you mean --hidden-size?"),
        ("--learning_rate 1e-4", "unknown flag --learning_rate: did you mean --lr?"),
        ("--lr", "--lr: needs a value"),
        ("--num-layers four", "--num-layers four: must be a number"),
        ("--lr nan", "--lr nan: must be a finite number"),
        ("--lr -1e-3x", "--lr -1e-3x: must be a number"),
        ("--train-samples -5M", "--train-samples -5M: must be a number"),
        ("--lr-decay-style cosin", "--lr-decay-style cosin: did you mean cosine?"),
        ("--num-unique_layers 3", "--num-unique-layers: weight sharing between layers is not supported: remove it"),
        ("--mask-prob 0.1", "--mask-prob: pretrain_gpt2.py has no such flag: it is BERT's, for pretrain_bert.py"),
        ("t5 --compile", "--compile: pretrain_t5.py has no such flag: it is GPT-2's, for pretrain_gpt2.py"),
        ("bert --top-k 3", "--top-k: it is for text generation: use tools/generate.py"),
        ("--batch-size 2 --micro-batch-size 3",
         "--batch-size 2 and --micro-batch-size 3 set the same thing: remove one"),
    ],
)  # fmt: skip
def test_mistakes_are_reported(words: str, message: str) -> None:
    assert message in complaints(words)


@pytest.mark.parametrize("words", ["", "--pipe-parallel-size 1 --gas 2 --zero-stage 1"])
def test_no_overlapped_reduction_needs_nothing(words: str) -> None:
    assert parse(f"{words} --no-zero-overlap-comm").zero.zero_overlap_comm is False


def test_a_misspelt_flag_hides_no_error_and_is_not_read_as_another() -> None:
    assert complaints("--zero-stag 1 --cpu-optimizer --min-lr 1") == [
        "unknown flag --zero-stag: did you mean --zero-stage?",
        "--min-lr 1 is more than --lr 0.001: lower it",
        "--offload-optimizer cpu needs --zero-stage 1, 2 or 3: add it, or remove --offload-optimizer cpu",
    ]


def test_help_lists_every_flag_with_its_section() -> None:
    text = build_parser().format_help()
    kinds = {flag_name(field): flag_of(field).models.split() for field in flag_fields().values()}
    kinds = {name: models for name, models in kinds.items() if models[0] not in ("t5", "llava")}
    listed = {name for name in kinds if name in re.findall(r"--[\w-]+", text)}
    assert listed == {name for name, models in kinds.items() if "gpt" in models}
    assert "--model-parallel-size, --tensor-model-parallel-size N" in text
    assert "(default: 128)" in text


def test_parsing_imports_no_torch() -> None:
    program = (
        "import sys; from megatron.cli import parse_run; import megatron.training.preflight; "
        "parse_run(sys.argv[1:], {}); print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", program, *SMALL.split()]
    assert subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_preset_gives_what_is_not_given() -> None:
    words = "--model-preset llama3.1-8b --num-layers 4 --mock-data --lr 1e-4 --train-iters 10 --batch-size 1".split()
    run = parse_run(words, CPU)
    assert (run.model.num_layers, run.model.hidden_size, run.model.query_groups) == (4, 4096, 8)
    assert (run.model.ffn_hidden_size, run.model.rotary_base, run.data.seq_length) == (14336, 500000.0, 8192)
    assert run.model.swiglu and not run.model.linear_bias and run.model.attention_dropout == 0
    assert not parse_run([*words, "--no-swiglu"], CPU).model.swiglu
    with pytest.raises(ConfigError, match="--model-preset bert-base is a model of pretrain_bert.py, and this is"):
        parse_run([*words, "--model-preset", "bert-base"], CPU)
    with pytest.raises(ConfigError, match="--model-preset llama3-8b: did you mean llama3.1-8b"):
        parse_run([*words, "--model-preset", "llama3-8b"], CPU)


@pytest.mark.parametrize(("hidden", "mlp"), [(8, 64), (48, 128), (4096, 10880)])
def test_the_default_width_of_a_gated_mlp_is_never_zero(hidden: int, mlp: int) -> None:
    assert parse(f"--swiglu --hidden-size {hidden} --num-attention-heads 2").model.ffn_hidden_size == mlp


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.parameters])
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    preset = PRESETS[name]
    architecture = next(spec for spec in ARCHITECTURES.values() if spec.program == preset.program)
    data = "--data-path corpus --tokenizer-type NullTokenizer --vocab-size 64"
    words = f"--model-preset {name} {data} --lr 1e-4 --train-iters 10 --batch-size 1".split()
    model = parse_run(words, CPU, architecture).model
    model = replace(model, vocab_size=preset.vocab_size, padded_vocab_size=preset.vocab_size)
    assert sum(spec.numel for spec in architecture.named_parameters(model).values()) == preset.parameters


@pytest.mark.parametrize(
    "words, chunks",
    [
        ("--num-layers-per-virtual-pipeline-stage 1", (1, 1, 1, 1)),
        ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved", (1, 1, 1, 1)),
        ("--pipeline-schedule interleaved --pipeline-partition 1,1,2,0", (1, 1, 2, 0)),
        ("--enable-zbh1-pipeline", (2, 2)),
        ("--pipeline-schedule zbv", (1, 1, 1, 1)),
    ],
)
def test_a_schedule_has_model_chunks(words: str, chunks: tuple[int, ...]) -> None:
    """The flags of Megatron-LM for virtual stages select the interleaved schedule."""
    run = parse(f"--pipe-parallel-size 2 --gas 4 {words}", ranks=2)
    assert layers_per_chunk(run) == chunks and run.parallel.model_chunks == len(chunks)
