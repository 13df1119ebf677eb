"""The loss takes some rows of the logits at a time, and lets go of them before it takes the next."""

from dataclasses import replace

import pytest
from support.programs import TINY_MODEL

from megatron.cli import parse_run
from megatron.ops.choices import rows_at_once
from megatron.tools.planning.activations import _loss_rows, sizes

COLUMNS, BLOCKS = 4096, 4


@pytest.mark.parametrize("padding", [0, 128])
def test_one_block_of_rows_is_alive_at_a_time(run_ranks, padding: int) -> None:
    """And torch's copy of it where the rows are not consecutive, as the planner counts."""
    rows = rows_at_once(COLUMNS, "cpu")
    ((forward, backward),) = run_ranks(1, peaks, BLOCKS * rows, padding)
    block = planned = 4 * rows * COLUMNS
    if padding:
        planned *= 2
    gradient = BLOCKS * block * (COLUMNS + padding) // COLUMNS
    words = [*TINY_MODEL, "--data-path", "d", "--vocab-file", "v", "--merge-file", "m", "--batch-size", str(rows)]
    run = parse_run([*words, "--train-iters", "1"], {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "1"})
    run = replace(run, model=replace(run.model, vocab_size=COLUMNS, padded_vocab_size=COLUMNS + padding))
    assert _loss_rows(run, sizes(run)) == planned
    assert planned <= forward < planned + 0.2 * block
    assert planned <= backward - gradient < planned + 0.2 * block, "beside the gradient of the logits"


def peaks(rows: int, padding: int) -> tuple[int, int]:
    """Most bytes that the loss of fp32 logits, and its gradient, take beyond what there was."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy

    def peak_of(step) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = step()  # noqa: F841
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        level = highest = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            level += event.nbytes()
            highest = max(highest, level)
        return highest

    logits, labels = torch.zeros(1, rows, COLUMNS + padding, requires_grad=True), torch.zeros(1, rows, dtype=torch.long)
    losses = []
    forward = peak_of(lambda: losses.append(vocab_parallel_cross_entropy(logits, labels, dist.group.WORLD, COLUMNS)))
    total = losses[0].sum()
    return forward, peak_of(total.backward)
