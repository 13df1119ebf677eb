"""The measurement of generation runs every variant, and all generate the same text."""


def test_every_variant_is_measured(run_ranks_once) -> None:
    (found,) = run_ranks_once(1, measure_tiny)
    alone = ["operators alone", "matrix products alone", "reading the weights alone"]
    assert [peer for peer, _ in found] == ["transformers", "the suite with --recompute", *alone]
    assert all(ratio > 0 for _, ratio in found)


def measure_tiny() -> list[tuple[str, float]]:
    from benchmarks.measures import generation

    generation.SIZES = (generation.Size(layers=1, hidden=32, vocabulary=300, new=4, batches=(2,)),)
    return [(result.peer, result.ratios[0]) for result in generation.measure(1)]
