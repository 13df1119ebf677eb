"""What the planner says of its error is what benchmarks/published.csv gives; memory is on the published side."""

from benchmarks.measures.published import measure
from megatron.tools.planning.output import MET


def test_the_stated_error_is_that_of_rows_to_which_nothing_was_fitted() -> None:
    rows = measure(1)
    nvidia = [row.ratios[0] for row in rows if row.peer.startswith("NVIDIA") and row.unit == "tokens/s"]
    assert len(nvidia) == 65 and all(0.85 < ratio < 1.15 for ratio in nvidia)
    (met,) = (row for row in rows if row.what.endswith("held out: error at most 15%"))
    assert (met.ours[0], met.theirs[0]) == MET
    boundaries = [row for row in rows if row.unit == "B"]
    assert boundaries and all((row.ratios[0] <= 1) is row.peer.endswith(": fits") for row in boundaries)
