"""The split of documents, against numbers computed with the classic program's rule."""

import pytest

from megatron.common.errors import ConfigError
from megatron.data.splits import split_documents


@pytest.mark.parametrize(
    ("documents", "split", "bounds"),
    [
        (1000, "969, 30, 1", (969, 999, 1000)),
        (1000, "949,50,1", (949, 999, 1000)),
        (1000, "949/50/1", (949, 999, 1000)),
        (1000, "0.9 0.05,0.05", (900, 950, 1000)),
        (10, "8,1,1", (8, 9, 10)),
        (7, "100", (7, 7, 7)),
        (7, "100,0,0", (7, 7, 7)),
        (7, "0,1", (0, 7, 7)),
        (0, "969,30,1", (0, 0, 0)),
        (1, "1,1", (1, 1, 1)),  # both round to 0: one too few
        (2, "1,1,1", (0, 1, 2)),  # each rounds to 1: one too many
        (3, "0,1,1", (0, 1, 3)),  # the same, at the lower end
    ],
)
def test_documents_are_split_by_weight(documents: int, split: str, bounds: tuple[int, int, int]) -> None:
    first, second, third = bounds
    assert split_documents(documents, split) == (range(first), range(first, second), range(second, third))


@pytest.mark.parametrize(
    "split", ["", "a,b", "969,,1", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf", "1e999", "1e308,1e308,0"]
)
def test_a_bad_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        split_documents(10, split)
