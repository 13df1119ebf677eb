"""Commands and flags of Megatron-LM, Megatron-DeepSpeed and DeepSpeed's 3D example, as they are."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA, SMALL_BERT, complaints, parse, read

from megatron.cli import ParsedRun, read_run
from megatron.cli.classic_flags import OUTCOMES, outcome_of
from megatron.cli.parser import build_parser
from megatron.cli.validation import RULES
from megatron.common.errors import DataError
from megatron.model.architectures import ARCHITECTURES, BERT, GPT2, T5
from megatron.tools.planning.explain import explain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-megatron.md"
PROCESSES = r"--(?:num_gpus|nproc_per_node) (\d+)"


def test_bert_has_its_tokenizer() -> None:
    assert parse("bert").data.tokenizer_type == "BertWordPieceLowerCase"
    words = SMALL_BERT.replace("--tokenizer-type BertWordPieceLowerCase", "").split()
    assert read_run(words, CPU, BERT).checked() == parse("bert")


def block(section: str, language: str) -> str:
    """The first block of code in a section of the page; empty if it has none."""
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return found[1] if found else ""


SECTIONS = {text.splitlines()[0]: text for text in PAGE.read_text().split("\n## ") if block(text, "bash")}


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_commands_of_the_page_are_legal(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, with the JSON of the same section."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(block(SECTIONS[heading], "json"))
    parsed = read_command(block(SECTIONS[heading], "bash"))
    assert parsed.problems == [] and parsed.run.ds_config


def read_command(command: str) -> ParsedRun:
    """The run of a command with its launcher."""
    words = shlex.split(command.replace("\\\n", " "))
    place, architecture = next(
        (words.index(spec.program), spec) for spec in ARCHITECTURES.values() if spec.program in words
    )
    hosts = re.search(r"--(?:num_nodes|nnodes) (\d+)", command)
    processes = int(re.search(PROCESSES, command)[1]) * int(hosts[1] if hosts else 1)
    return read_run(words[place + 1 :], {**CUDA, "WORLD_SIZE": str(processes)}, architecture)


@pytest.mark.parametrize(
    "words, same",
    [
        ("--pipeline-model-parallel-size 1 --no-pipeline-parallel", ""),
        ("--no-position-embedding --use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--position-embedding-type rope --no-position-embedding", "--position-embedding-type rope"),
        ("--global-batch-size 6", "--gas 3"),
        ("--zero_stage 1.0", "--zero-stage 1"),
        ("--use-distributed-optimizer", "--zero-stage 1"),
        ("--zero-stage 1 --optimizer-cpu-offload", "--zero-stage 1 --offload-optimizer cpu"),
        ("--deepspeed-activation-checkpointing", "--checkpoint-activations"),
        ("--recompute-granularity full", "--checkpoint-activations"),
        ("--recompute-activations", "--checkpoint-activations --recompute-granularity selective"),
        ("--checkpoint_activations --distribute-checkpointed-activations --contiguous-checkpointing",
         "--checkpoint-activations --partition-activations --contigious-checkpointing"),
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2",
         "--checkpoint-activations --checkpoint-num-layers 2"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
         "--checkpoint-activations --checkpoint-num-layers 2"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "--bf16 --grad-accum-dtype fp32"),
        ("--pre-tockens 8 --next-tockens 0", "--pre-tokens 8"),
        ("--window-size 8,0", "--pre-tokens 8"),
        ("--normalization rmsnorm --lr-decay-style Linear", "--normalization RMSNorm --lr-decay-style linear"),
        ("--norm-epsilon 1e-6 --no-bias-gelu-fusion --no-gradient-accumulation-fusion", "--layernorm-epsilon 1e-6"),
        ("--deepspeed --deepscale --exit-signal-handler --dataloader-type single --num-experts 1", ""),
    ],
)  # fmt: skip
def test_other_names_mean_the_same(words: str, same: str) -> None:
    ranks = 2 if "model-parallel-size 2" in words else 1
    assert read(words, ranks=ranks) == read(same, ranks=ranks)
    assert (parse(words, ranks=ranks) == parse(ranks=ranks)) == (not same), "and changes the run"


@pytest.mark.parametrize(
    "words, warning",
    [
        ("--use-flash-attn", "--use-flash-attn has no effect: attention is torch's fused kernel"),
        ("--next-tockens 5", "--next-tockens 5 has no effect: no token of a causal model attends to later tokens"),
        ("--dataloader-type cyclic", "--dataloader-type cyclic has no effect: samples are shuffled for each"),
        ("--use-te-activation-func", "--use-te-activation-func has no effect: kernels are chosen by --fused-kernels"),
        ("--zero-reduce-bucket-size 5e6 --zero-contigious-gradients",
         "--zero-reduce-bucket-size has no effect without --zero-stage 1, 2 or 3: add it, or remove --zero-reduce-"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_warnings(words: str, warning: str) -> None:
    parsed = read(words)
    assert parsed.problems == []
    (found,) = parsed.warnings
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--num-experts 8 --use-tutel", "--use-tutel: not a part of the mixture of experts here: remove it"),
        ("--recompute-method block", "--recompute-method: all layers are recomputed, fully or in part"),
        ("--retro-workdir x", "unknown flag --retro-workdir: see --help"),
        ("--pipe-parallel-size 2 --no-pipeline-parallel", "--pipe-parallel-size 2 and --no-pipeline-parallel set the"),
        ("--position-embedding-type learned_absolute --no-position-embedding", "--position-embedding-type learned_ab"),
        ("--use-distributed-optimizer --zero-stage 2", "--use-distributed-optimizer and --zero-stage 2 set the same"),
        # Similar to a flag that accepts these values, and not read as that.
        ("--rampdown-batch-size 16 16 1000", "unknown flag --rampdown-batch-size: did you mean --rampup-batch-size?"),
    ],
)  # fmt: skip
def test_unsupported_flags_are_refused_with_a_reason(words: str, message: str) -> None:
    (found,) = complaints(words)
    assert found.startswith(message)


def test_every_classic_flag_has_one_outcome() -> None:
    flags = {
        name for spec in (GPT2, BERT, T5) for action in build_parser(spec)._actions for name in action.option_strings
    }
    assert [name for name in OUTCOMES if f"--{name}" in flags] == [], "an outcome would never be used"
    assert {outcome.kind for outcome in OUTCOMES.values()} == {"replaced", "fulfilled", "ignored", "refused"}
    named = {flag for outcome in OUTCOMES.values() for flag in re.findall(r"--[\w-]+", outcome.text)}
    known = flags | {f"--{name.partition('=')[0]}" for name in OUTCOMES}
    assert {flag.replace("_", "-") for flag in named} - known == set(), "replacements exist"
    assert outcome_of("rope-type", ["rope"]) == OUTCOMES["rope-*"], "a family"


STAGE_2 = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 500_000_000},
    "optimizer": {"type": "Adam", "legacy_fusion": False, "params": {"lr": 0.001, "max_grad_norm": 0.5}},
}


def test_max_grad_norm_is_gradient_clipping(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(STAGE_2))
    run = parse(f"--deepspeed_config {file}")
    assert run.optim.clip_grad == run.ds_config["gradient_clipping"] == 0.5
    assert "max_grad_norm" not in run.ds_config["optimizer"]["params"], "DeepSpeed raises ValueError for it"
    (message,) = complaints(f"--deepspeed_config {file} --clip-grad 1")
    assert message.endswith("delete optimizer.params.max_grad_norm from the file to use the flag, or delete the flag")
    file.write_text(json.dumps({**STAGE_2, "gradient_clipping": 1}))
    assert complaints(f"--deepspeed_config {file}") == [
        "optimizer.params.max_grad_norm 0.5 and gradient_clipping 1 contradict each other: delete "
        "max_grad_norm, the old name of gradient_clipping"
    ]


def test_warnings_are_explained(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(DataError):  # there is no corpus
        explain(read("--use-flash-attn --save-interval 5"))
    printed = capsys.readouterr().out.splitlines()
    kept = f"{len(RULES)} rules, 0 broken, 1 warning, {len(RULES) - 1} kept; --verbose lists those kept"
    assert printed[:2] == ["warning --save-interval needs --save", kept]
    assert [line.split(":")[1] for line in printed if line.startswith("warning: ")] == [
        " --use-flash-attn has no effect",
        " --save-interval has no effect without --save",
    ]
