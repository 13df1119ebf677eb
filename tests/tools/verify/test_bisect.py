"""The parts of a tensor that ranks should have, smaller layouts, and what values say."""

import pytest
import torch
from support.command_lines import CPU, SMALL

from megatron.tools.verify.bisect import smaller_layouts
from megatron.tools.verify.request import make_request, parse_layout, rule_violations
from megatron.tools.verify.shards import Place, cuts_of

LENGTHS = (16, 0)


def part(place: Place, full: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    cuts = cuts_of(place, full.shape, shape, LENGTHS)
    assert cuts is not None
    for cut in cuts:
        full = cut.of(full)
    return full


def place(tensor=(0, 1), ring=(0, 1), ulysses=(0, 1), sequence_parallel=False) -> Place:
    return Place(tensor, ring, ulysses, (0, 1), 0, sequence_parallel)


HIDDEN = torch.arange(2 * 16 * 8).view(2, 16, 8)
"""[b, s, h]"""
HEADS = torch.arange(4 * 16).view(1, 4, 16, 1)
"""[b, n, s, d]"""


@pytest.mark.parametrize(
    ("rank", "full", "expected"),
    [
        (place(), HIDDEN, HIDDEN),
        (place(tensor=(1, 2)), HIDDEN, HIDDEN),
        (place(tensor=(1, 2)), HIDDEN, HIDDEN[..., 4:]),
        (place(tensor=(3, 4)), HEADS, HEADS[:, 2:]),  # two ranks have the same heads
        (place(tensor=(1, 2), sequence_parallel=True), HIDDEN, HIDDEN[:, 8:]),
        (place(tensor=(1, 2), sequence_parallel=True), HIDDEN, HIDDEN[..., 4:]),
        (place(ring=(1, 2)), HIDDEN, HIDDEN[:, 4:12]),
        (place(tensor=(1, 2), ring=(1, 2), sequence_parallel=True), HIDDEN, HIDDEN[:, 8:12]),
        (place(tensor=(0, 2), ring=(1, 2)), HEADS, HEADS[:, :2, 4:12]),
        (place(ulysses=(1, 2)), HIDDEN, HIDDEN[:, 8:]),
        (place(ulysses=(1, 2)), HEADS, HEADS[:, 2:]),  # inside of the exchange
        (place(ring=(1, 2), ulysses=(1, 2)), HIDDEN, HIDDEN[:, 8:12]),
        (place(ring=(1, 2), ulysses=(1, 2)), HEADS, HEADS[:, 2:, 4:12]),
    ],
)
def test_the_part_of_a_rank(rank: Place, full: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(part(rank, full, expected.shape), expected)


def test_shapes_that_no_axis_explains() -> None:
    assert cuts_of(place(), (2, 16, 8), (2, 8, 8), LENGTHS) is None
    assert cuts_of(place(tensor=(0, 2)), (2, 16, 8), (2, 8, 4), LENGTHS) is None
    assert cuts_of(place(tensor=(0, 2)), (2, 16, 8), (2, 16, 5), LENGTHS) is None


def test_smaller_layouts_have_fewer_ranks_first() -> None:
    request = make_request(
        SMALL.replace("--batch-size 2", "--batch-size 2 --global-batch-size 8").split(), 5, None, CPU
    )
    layout = parse_layout("tp2-pp2-dp2-zero1-sp")
    smaller = list(smaller_layouts(request, layout))
    sizes = [one.processes for one in smaller]
    assert sizes == sorted(sizes) and layout not in smaller and not rule_violations(request, smaller)
    names = {one.name for one in smaller}
    assert {"tp2-pp0-dp1", "tp2-pp0-dp1-sp", "tp1-pp2-dp1", "tp1-pp0-dp2", "tp2-pp2-dp2"} <= names
    assert "tp1-pp0-dp1" not in names
