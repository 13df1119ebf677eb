"""Names of layouts, which layouts are legal, and the command lines of their runs."""

import pytest
from support.command_lines import CPU, SMALL

from megatron.common.errors import ConfigError
from megatron.tools.verify.request import (
    ONE_PROCESS,
    Layout,
    Request,
    make_request,
    parse_layout,
    reference_of,
    rule_violations,
    supported_layouts,
)

SMALL_WORDS = SMALL.replace("--batch-size 2", "--batch-size 2 --global-batch-size 8").split()


@pytest.mark.parametrize(
    "name, layout",
    [
        ("tp1-pp1-dp1", Layout(1, 1, 1)),
        ("tp2-pp0-dp2-zero3", Layout(2, 0, 2, zero=3)),
        ("tp2-pp1-dp2-zero3-plain", Layout(2, 0, 2, zero=3)),
        ("tp4-pp2-dp1-zero1-sp-dualpipev", Layout(4, 2, 1, zero=1, sequence_parallel=True, schedule="dualpipev")),
        ("tp1-pp2-dp1-interleaved3", Layout(1, 2, 1, schedule="interleaved", virtual_stages=3)),
        ("dp2-tp1-pp2", Layout(1, 2, 2)),
        ("tp1-pp0-dp2-zero1-ulysses2", Layout(1, 0, 2, zero=1, ulysses=2)),
        ("tp2-pp2-dp1-cp2", Layout(2, 2, 1, context=2)),
    ],
)
def test_a_name_is_read(name: str, layout: Layout) -> None:
    assert parse_layout(name) == parse_layout(layout.name) == layout


@pytest.mark.parametrize(
    "name, message",
    [
        ("tp2-pp2", "sizes of TP, PP and DP are needed; write tpA-ppB-dpC"),
        ("tp2-pp2-dp2-zero", "'zero' is not part of a layout's name"),
        ("tp2-pp2-dp2-sp-sp", "'sp' is not part of"),
        ("tp2-pp2-dp2-zbv-interleaved2", "a pipeline has one schedule"),
        ("tp2-pp2-dp2-plain", "DeepSpeedEngine has no stages"),
    ],
)
def test_a_malformed_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layout(name)


def request(words: str = "", iterations: int = 5, first: Layout | None = None) -> Request:
    return make_request([*SMALL_WORDS, *words.split()], iterations, first, CPU)


def test_every_legal_layout_of_two_processes() -> None:
    """As the rules say: ZeRO 2 and 3 without a pipeline only, sequence parallelism with tensor parallelism only."""
    plain = {f"{grid}{zero}" for grid in ("tp1-pp0-dp2", "tp2-pp0-dp1") for zero in ("", "-zero1", "-zero2", "-zero3")}
    stages = {f"tp{t}-pp{p}-dp{d}{zero}" for t, p, d in [(1, 1, 2), (2, 1, 1), (1, 2, 1)] for zero in ("", "-zero1")}
    legal = {layout.name for layout in supported_layouts(request(), 2)}
    schedules = ("interleaved2", "zbh1", "zbv", "dualpipev")
    assert {name for name in legal if not name.endswith(("sp", "cp2", "ulysses2", *schedules))} == plain | stages | {
        "tp1-pp0-dp1"
    }
    assert {f"{name}-sp" for name in plain | stages if "tp2" in name} == {
        name for name in legal if name.endswith("-sp")
    }
    assert {f"tp1-{engine}-dp1{zero}-cp2" for engine in ("pp0", "pp1") for zero in ("", "-zero1")} <= legal
    assert {f"{name}-{schedule}" for name in stages if "pp2" in name for schedule in schedules} <= legal


def test_a_sample_of_the_legal_layouts_is_chosen_by_its_seed() -> None:
    asked = request()
    first, *some = supported_layouts(asked, 8, sample=6, seed=1)
    assert first == ONE_PROCESS and len(set(some)) == 6 and all(layout.processes == 8 for layout in some)
    assert not rule_violations(asked, some)
    assert (
        supported_layouts(asked, 8, sample=6, seed=1) == [first, *some] != supported_layouts(asked, 8, sample=6, seed=2)
    )
    every = supported_layouts(asked, 1)
    assert sorted(map(str, supported_layouts(asked, 1, sample=1000))) == sorted(map(str, every))


def test_an_illegal_layout_is_refused_with_the_rule() -> None:
    (message,) = rule_violations(request(), [parse_layout("tp1-pp2-dp1"), parse_layout("tp1-pp2-dp1-zero2")])
    assert message.startswith("layout tp1-pp2-dp1-zero2: --zero-stage 2 cannot be combined with --pipe-parallel-size 2")


def test_all_layouts_take_the_global_batch_of_the_first() -> None:
    words = SMALL.split()  # micro-batches of 2
    asked = make_request([*words, "--gas", "4"], 5, ONE_PROCESS, CPU)
    runs = {name: asked.run(parse_layout(name)) for name in ("tp1-pp0-dp1", "tp1-pp0-dp2", "tp2-pp2-dp1")}
    assert {name: run.train.global_batch_size for name, run in runs.items()} == dict.fromkeys(runs, 8)
    assert [run.train.gradient_accumulation_steps for run in runs.values()] == [4, 2, 4]
    first = make_request([*words, "--gas", "4"], 5, parse_layout("tp1-pp0-dp2"), CPU)
    assert first.run(ONE_PROCESS).train.global_batch_size == 16


@pytest.mark.parametrize(
    "words, message",
    [
        ("--zero-stage 1", "--zero-stage 1 belongs to the layouts: choose it by their names"),
        *(
            (flag, f"{flag} belongs to the comparison: remove it")
            for flag in (
                "--save out",
                "--keep-last 2",
                "--auto-resume",
                "--async-save",
                "--no-save-optim",
                "--load-strict",
                "--skip-train",
                "--snapshot-interval 2",
                "--on-save-error stop",
            )
        ),
        ("--train-iters 4", "--train-iters 4 is less than the 5 iterations that are compared"),
    ],
)
def test_flags_that_the_tool_sets_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        request(words)
    assert message in caught.value.messages


def test_a_layout_with_another_auxiliary_loss_has_a_reference_of_its_own() -> None:
    names = ("tp2-pp1-dp1", "tp1-pp0-dp2", "tp1-pp1-dp2-ep2-zero1-dualpipev")
    experts = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type"
    replicas = parse_layout("tp1-pp0-dp2")
    for kind, other in {"global_aux_loss": replicas, "aux_loss": ONE_PROCESS}.items():
        asked = request(f"{experts} {kind}")
        assert [reference_of(asked, parse_layout(name)) for name in names] == [ONE_PROCESS, other, other]
