"""How long a text may become."""

import pytest

from megatron.common.errors import ConfigError
from megatron.tools.inference.prompts import StoppingCriteria, checked_length


@pytest.mark.parametrize(
    ("settings", "prompt", "longest"),
    [
        ({}, 10, 74),
        ({}, 90, 100),  # by default up to the context
        ({"slides": True}, 90, 154),
        ({"new_tokens": 5}, 95, 100),
        ({"out_seq_length": 100}, 10, 100),
        ({"out_seq_length": 50, "new_tokens": 5}, 10, 15),
        ({"out_seq_length": 50, "new_tokens": 5}, 48, 50),
        ({"out_seq_length": 300, "slides": True}, 200, 300),
    ],
)
def test_the_nearest_limit_counts(settings, prompt, longest):
    assert checked_length([1] * prompt, StoppingCriteria(context=100, **settings)) == longest


@pytest.mark.parametrize(
    ("settings", "prompt", "words"),
    [
        ({}, 0, "the prompt is empty"),
        ({}, 100, "a prompt of 100 tokens and 1 new ones exceed the 100"),
        ({"new_tokens": 5}, 96, "a prompt of 96 tokens and 5 new ones exceed the 100"),
        ({"out_seq_length": 101}, 10, "10 tokens and 91 new ones exceed the 100"),
        ({"out_seq_length": 50}, 50, "--out-seq-length 50 leaves none"),
        ({"out_seq_length": 50, "slides": True}, 51, "--out-seq-length 50 leaves none"),
    ],
)
def test_too_long_prompts_are_refused(settings, prompt, words):
    with pytest.raises(ConfigError, match=words):
        checked_length([1] * prompt, StoppingCriteria(context=100, **settings))
