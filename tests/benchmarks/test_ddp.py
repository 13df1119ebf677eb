"""The limits of two ranks are made of a step without communication, the collectives, and the bubble."""

import pytest

from benchmarks.comparing import Times
from benchmarks.measures.ddp import WAYS, _of_way

SECONDS = {
    "suite": 2.0, "DDP": 1.5, "bare DeepSpeed": 3.0, "no communication": 1.6, "all-reduce": 0.2, "reduce-scatter": 0.05,
    "all-gather": 0.1, "bare DeepSpeed, same collectives": 2.5, "FSDP2": 2.0,
    "stages": 1.7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "without", "predicted"),
    [
        ("ZeRO 0", ["FSDP2"], 1.6 + 0.2),
        ("ZeRO 2", [], 1.6 + 4 * 0.05 + 0.1),
        ("ZeRO 3, reduced once", [], 1.6 + 0.05 + 8 * 0.1),
        ("PP 2", ["FSDP2", "bare DeepSpeed, same collectives"], 1.6 * 9 / 8),
        ("PP 2, zbh1", ["FSDP2", "bare DeepSpeed", "bare DeepSpeed, same collectives"], 1.6 * 25 / 24),
    ],
)
def test_a_step_is_compared_with_its_limits(name: str, without: list[str], predicted: float) -> None:
    times = {kind: Times([each], [each]) for kind, each in SECONDS.items() if kind not in without}
    found = {result.peer: result for result in _of_way(name, WAYS[name], times)}
    assert found["torch's DDP"].ratios == [0.75]
    limits = {peer: result.ratios[0] for peer, result in found.items() if result.is_limit}
    same = {} if "bare DeepSpeed, same collectives" in without else {"bare DeepSpeed, same collectives": 1.25}
    if WAYS[name].chunks:
        same = {"its stages alone, and the bubble": predicted / 2 * 1.7 / 1.6}
    bound = "the bubble" if WAYS[name].chunks else "the collectives"
    assert limits == pytest.approx({**same, f"no communication, and {bound}": predicted / 2})
