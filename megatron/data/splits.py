"""``--split``: which documents are for training, for validation and for the test."""

import math
import re

from megatron.errors import ConfigError


def split_weights(split: str) -> tuple[float, float, float]:
    """Parse ``"969, 30, 1"``: up to three weights, divided by commas, slashes or blanks; missing ones are 0.

    Raises:
        ConfigError: not one to three numbers, a negative one, or none above 0.
    """
    try:
        weights = [float(part) for part in re.split(r"\s*[,/]\s*|\s+", split.strip())]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise ConfigError(
            f'--split "{split}": expected one to three weights for training, validation and test, such as "969, 30, 1"'
        )
    training, validation, test = weights + [0.0] * (3 - len(weights))
    return training, validation, test


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Cut the documents ``0 .. num_documents - 1`` into three runs in proportion to the weights of ``split``.

    As in the classic programs each length is rounded by itself, and what the rounding has made too
    many or too few is taken from every boundary, so that the last run ends with the last document.
    """
    weights = split_weights(split)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / sum(weights) * num_documents))
    excess = bounds[-1] - num_documents
    first, second, third = (max(bound - excess, 0) for bound in bounds[1:])
    return range(first), range(first, second), range(second, third)
