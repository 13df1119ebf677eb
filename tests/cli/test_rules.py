"""Each rule: its message says what is wrong and what to do, and the suggested fix is legal."""

import pytest
from support.broken_rules import BROKEN, WARNED
from support.command_lines import CPU, CUDA, SMALL, complaints, parse, read

from megatron.cli import parse_run
from megatron.cli.validation import RULES, violations
from megatron.common.errors import ConfigError


@pytest.mark.parametrize("name, words, message, remedy", BROKEN, ids=[row[1] for row in BROKEN])
def test_a_broken_rule_says_what_to_do(name: str, words: str, message: str, remedy: str | None) -> None:
    environ = CUDA if words.startswith("gpu") else CPU
    words = words.removeprefix("gpu")
    ranks = 8 if "parallel" in words else 1
    (printed,) = complaints(words, ranks=ranks, environ=environ)
    assert printed.startswith(message)
    if remedy:
        assert complaints(f"{words} {remedy}", ranks=ranks, environ=environ) == []


@pytest.mark.parametrize("name, words, message, remedy", WARNED, ids=[row[1] for row in WARNED])
def test_a_harmless_setting_is_a_warning(name: str, words: str, message: str, remedy: str) -> None:
    environ = CUDA if words.startswith("gpu") else CPU
    parsed, fixed = (read(line.removeprefix("gpu"), environ=environ) for line in (words, f"{words} {remedy}"))
    assert (parsed.problems, fixed.problems, fixed.warnings) == ([], [], [])
    assert len(parsed.warnings) == 1 and parsed.warnings[0].startswith(message)


@pytest.mark.parametrize("words", [words for _, words, *_ in BROKEN])
def test_rules_can_be_read_to_the_end(words: str) -> None:
    """A rule with more than one message raises no error while it is read to the end."""
    environ, ranks = CUDA if words.startswith("gpu") else CPU, 8 if "parallel" in words else 1
    run = read(words.removeprefix("gpu"), ranks=ranks, environ=environ).run
    assert any(list(rule.messages(run)) for rule in RULES)


def test_every_rule_is_tested_and_explained() -> None:
    errors = {name for name, *_ in BROKEN} | {
        "processes = TP x PP x CP x SP x DP",
        "BPE needs merges",
        "every batch size is a multiple of micro-batch x DP",
        "a tokenizer has a vocabulary",
        "a decoder has a sequence length",
        "--dry-run and --run-dir need the spec of the model",
        "--load-hf excludes --load",
        "--load-hf excludes --model-preset",
        "--load-hf needs the model of this program",
        "adapters belong to layers of this suite",
        "experts belong to layers of this suite",
    }
    warned = {name for name, *_ in WARNED} | {"--vocab-size is for NullTokenizer"}
    tested = errors | warned
    assert {rule.name for rule in RULES if not rule.only_warns} == errors
    assert {rule.name for rule in RULES if rule.only_warns} == warned
    assert len(tested) == len(RULES)
    assert all(rule.why.endswith(".") for rule in RULES)


def test_a_legal_run_breaks_no_rule() -> None:
    assert violations(parse()) == []


@pytest.mark.parametrize(
    "ranks, words, message",
    [
        (
            6,
            "--model-parallel-size 4",
            "6 processes cannot be split into --model-parallel-size 4: "
            "use 4 or 8 processes, or --model-parallel-size 1 or 2",
        ),
        (
            1,
            "--model-parallel-size 2 --pipe-parallel-size 2",
            "1 process cannot be split into --model-parallel-size 2 x --pipe-parallel-size 2: use 4 processes",
        ),
        (
            2,
            "--model-parallel-size 2 --pipe-parallel-size 2",
            "2 processes cannot be split into --model-parallel-size 2 x --pipe-parallel-size 2: "
            "use 4 processes, or --model-parallel-size 1, or --pipe-parallel-size 1",
        ),
        (
            6,
            "--model-parallel-size 2 --ds-sequence-parallel-size 2",
            "6 processes cannot be split into --model-parallel-size 2 x --ds-sequence-parallel-size 2: "
            "use 4 or 8 processes, or --model-parallel-size 1, or --ds-sequence-parallel-size 1",
        ),
    ],
)
def test_processes_that_cannot_be_split(ranks: int, words: str, message: str) -> None:
    assert complaints(words, ranks=ranks) == [message]


def test_merges_belong_to_bpe_only() -> None:
    words = SMALL.replace("--merge-file merges.txt", "").split()
    with pytest.raises(ConfigError, match="--merge-file is required with --tokenizer-type GPT2BPETokenizer"):
        parse_run(words, CPU)
    assert parse_run([*words, "--tokenizer-type", "WhitespaceTokenizer"], CPU).data.merge_file is None


def test_all_broken_rules_are_reported_at_once() -> None:
    words = "--model-parallel-size 3 --pipe-parallel-size 8 --zero-stage 3 --fp16 --checkpoint-in-cpu --dropout 1"
    assert len(complaints(f"{words} --hidden-dropout 1.5 --hidden-size 66 --unheard-of", ranks=8)) >= 9
