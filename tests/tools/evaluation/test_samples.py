"""The windows that a long text is seen through."""

import numpy as np
import pytest

from megatron.tools.evaluation.tasks import windows


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 17, 40, 41])
@pytest.mark.parametrize(("size", "stride"), [(8, 1), (8, 3), (8, 8), (1, 1)])
def test_every_token_is_predicted_once_with_enough_context(length: int, size: int, stride: int):
    predicted = []
    for number, window in enumerate(windows(np.arange(length), size=size, stride=stride)):
        inputs = len(window.tokens) - 1
        assert 1 <= window.predicted <= inputs <= size
        if number:
            assert inputs - window.predicted >= size - stride
        predicted += list(window.tokens[inputs + 1 - window.predicted :])
    assert predicted == list(range(1, length))
