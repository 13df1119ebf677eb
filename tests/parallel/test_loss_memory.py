"""The loss takes some rows of the logits at a time, and lets go of them before it takes the next."""

from megatron.parallel.tensor import rows_at_once

COLUMNS, BLOCKS = 4096, 4


def test_one_block_of_rows_is_alive_at_a_time(run_ranks) -> None:
    rows = rows_at_once(COLUMNS, "cpu")
    ((forward, backward),) = run_ranks(1, peaks, BLOCKS * rows)
    block = 4 * rows * COLUMNS
    assert block <= forward < 1.2 * block
    assert block <= backward - BLOCKS * block < 1.2 * block, "beside the gradient of the logits"


def peaks(rows: int) -> tuple[int, int]:
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

    logits, labels = torch.zeros(1, rows, COLUMNS, requires_grad=True), torch.zeros(1, rows, dtype=torch.long)
    losses = []
    forward = peak_of(lambda: losses.append(vocab_parallel_cross_entropy(logits, labels, dist.group.WORLD)))
    total = losses[0].sum()
    return forward, peak_of(total.backward)
