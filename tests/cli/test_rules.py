"""Each rule: its message names what was given, and what fixes the command line makes it legal."""

from collections.abc import Mapping
from dataclasses import fields

import pytest
from broken_rules import BROKEN, WARNED
from support.command_lines import CPU, CUDA, complaints, read

from megatron.cli.validation import RULES
from megatron.cli.validation.rules import condition
from megatron.config import flag_fields, sections
from megatron.config.fields import flag_of, with_reasons


def surroundings(words: str) -> tuple[str, int, Mapping[str, str]]:
    """The flags of a row, with the ranks and the environment that they are checked with."""
    return words.removeprefix("gpu "), 8 if "parallel" in words else 1, CUDA if words.startswith("gpu") else CPU


@pytest.mark.parametrize("words, remedy", BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_rule_names_what_was_given_and_has_a_remedy(words: str, remedy: str) -> None:
    words, ranks, environ = surroundings(words)
    (printed,) = complaints(words, ranks=ranks, environ=environ)
    assert any(word in printed for word in words.split() if len(word) > 2), printed
    if remedy:
        assert complaints(f"{words} {remedy}", ranks=ranks, environ=environ) == []


@pytest.mark.parametrize("words, remedy", WARNED, ids=[row[0] for row in WARNED])
def test_a_harmless_setting_is_a_warning(words: str, remedy: str) -> None:
    words, ranks, environ = surroundings(words)
    parsed, fixed = (read(line, environ=environ) for line in (words, f"{words} {remedy}"))
    assert (parsed.problems, fixed.problems, fixed.warnings) == ([], [], [])
    assert len(parsed.warnings) == 1


def test_every_rule_is_tested() -> None:
    """All messages of a broken rule can be read; of the rules that metadata state one of each kind is tested."""
    tested = {
        "processes = TP x PP x CP x SP x DP",
        "BPE needs merges",
        "Every batch size is a multiple of micro-batch x DP",
        "A tokenizer has a vocabulary",
        "A user's own model (of pretrain) has no list of layers",
    }
    for row in (*BROKEN, *WARNED):
        words, ranks, environ = surroundings(row[0])
        run = read(words, ranks=ranks, environ=environ).run
        tested |= {rule.kind or rule.name for rule in RULES if list(rule.messages(run))}
    assert {rule.kind or rule.name for rule in RULES} == tested
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_conditions_name_values_that_flags_have() -> None:
    """What the metadata of the fields say of each other."""
    types = {field.name: field.type for section in sections().values() for field in fields(section)}
    for field in flag_fields().values():
        flag = flag_of(field)
        assert {*flag.instead_of} <= {*flag_fields()}
        for text in [text for each in (flag.needs, flag.ignored_without, flag.excludes) for text in with_reasons(each)]:
            own, _, others = text.rpartition(": ")
            for part in (*([f"{field.name}={own}"] if own else []), *others.split(" or ")):
                known = condition(part)
                choices = flag_of(known.field).choices
                assert {*known.values} <= {*(choices or known.values)}, part
                assert choices or "int" in str(types[known.field.name]) or not known.values or part.endswith("=0")


@pytest.mark.parametrize(
    "ranks, words, remedy",
    [
        (6, "--model-parallel-size 4", "use 4 or 8 processes, or --model-parallel-size 1 or 2"),
        (1, "--model-parallel-size 2 --pipe-parallel-size 2", "use 4 processes"),
        (6, "--model-parallel-size 2 --ds-sequence-parallel-size 2",
         "use 4 or 8 processes, or --model-parallel-size 1, or --ds-sequence-parallel-size 1"),
    ],
)  # fmt: skip
def test_processes_that_cannot_be_split(ranks: int, words: str, remedy: str) -> None:
    (message,) = complaints(words, ranks=ranks)
    sizes = words.replace(" --", " x --")
    assert message == f"{ranks} process{'es' * (ranks > 1)} cannot be split into {sizes}: {remedy}"
