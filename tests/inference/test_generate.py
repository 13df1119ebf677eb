"""Continuing a prompt: how tokens are chosen, and the tool on checkpoints of both engines."""

import pytest
import torch

from megatron.inference.sampling import Sampling, choose

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def _chosen(sampling: Sampling, draws: int = 400) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {int(choose(LOGITS, sampling, generator)) for _ in range(draws)}


def test_choosing_among_some():
    assert _chosen(Sampling(greedy=True)) == {1}
    assert _chosen(Sampling(temperature=5.0)) == {0, 1, 2, 3, 4}
    assert _chosen(Sampling(temperature=5.0, top_k=2)) == {1, 3}
    # Probabilities are 0.64, 0.24, 0.09, 0.03, 0.01: the first two hold 0.8, and one of them does not.
    assert _chosen(Sampling(top_p=0.8)) == {1, 3}
    assert _chosen(Sampling(top_p=0.5)) == {1}
    assert _chosen(Sampling(temperature=0.01)) == {1}


def test_frequencies_are_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([choose(LOGITS, Sampling(), generator) for _ in range(4000)])
    shares = torch.bincount(draws.flatten(), minlength=5) / 4000
    torch.testing.assert_close(shares, LOGITS.softmax(0), atol=0.03, rtol=0)


@pytest.fixture(scope="module")
def checkpoints(train_in_ranks, tmp_path_factory):
    """The same training, saved by one process and by four."""
    folder = tmp_path_factory.mktemp("trained")
    settings = (
        "--train-iters 5 --batch-size 4 --gas 1 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --eod-mask-loss"
    ).split()
    train_in_ranks(1, *settings, "--save", folder / "whole")
    cut = "--model-parallel-size 2 --pipe-parallel-size 2".split()
    train_in_ranks(4, *settings, *cut, "--save", folder / "cut")
    return folder


def test_every_layout_continues_alike(programs, checkpoints):
    texts = [
        programs.python(
            "tools/generate.py", "--load", checkpoints / layout, "--prompt", "w5 w80", "--new-tokens", "20", *flags
        ).ok().output
        for flags in (["--greedy"], ["--temperature", "0.8", "--top_k", "20", "--seed", "3"])
        for layout in ("whole", "cut")
    ]  # fmt: skip
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[1] != texts[2]
    assert all(text.startswith("w5 w80 ") and text.count("\n") == 1 for text in texts)


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["--load", "nowhere", "--prompt", "w1"], "--load nowhere: no checkpoint there", 4),
        (["--load", "{}", "--prompt", ""], "--prompt is empty", 2),
        (["--load", "{}", "--prompt", "w1", "--temperature", "0"], "--temperature 0 must be above 0", 2),
        (["--load", "{}", "--prompt", "w1", "--vocab-file", "none.json"], "none.json", 3),
        (["--load", "{}"], "--prompt", 2),
    ],
)
def test_mistakes(programs, checkpoints, flags, message, code):
    flags = [flag.format(checkpoints / "whole") for flag in flags]
    finished = programs.python("tools/generate.py", *flags)
    assert finished.returncode == code
    assert message in finished.output and finished.output.count("\n") == 1, finished.output
