"""What the planner says of its error is what benchmarks/published.csv gives; memory is on the published side."""

from pathlib import Path

from benchmarks.measures.published import ALL_HELD_OUT, HELD_OUT, measure
from megatron.tools.planning.output import MET

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_stated_error_is_that_of_rows_to_which_nothing_was_fitted() -> None:
    rows = measure(1)
    nvidia = [row.ratios[0] for row in rows if row.peer.startswith("NVIDIA") and row.unit == "tokens/s"]
    assert len(nvidia) == 65 and all(0.85 < ratio < 1.15 for ratio in nvidia)
    counts = {row.what.partition(":")[0]: (row.ours[0], row.theirs[0]) for row in rows if row.unit == "rows"}
    assert counts[ALL_HELD_OUT] == MET
    page = PAGE.read_text()
    for row in rows:
        name, _, _ = row.what.partition(":")
        if row.unit == "%" and name.endswith(f", {HELD_OUT}"):
            cells = (
                name.removesuffix(f", {HELD_OUT}"),
                counts[name][1],
                f"{row.ours[0]:.1f} %",
                f"{row.theirs[0]:.1f} %",
            )
            assert f"| {' | '.join(map(str, cells))} |" in page
    boundaries = [row for row in rows if row.unit == "B"]
    assert boundaries and all((row.ratios[0] <= 1) is row.peer.endswith(": fits") for row in boundaries)
