"""Measurements run in a tiny form, and compare what they say."""

from pathlib import Path

from benchmarks.measures.shapes import Shape

TINY = Shape(layers=1, hidden=32, heads=2, sequence=16, batch=1, vocabulary=128)


def test_checkpoints_are_compared_and_leave_no_files(run_ranks_once, tmp_path: Path) -> None:
    (peers,) = run_ranks_once(1, measure_checkpoints, str(tmp_path))
    assert peers == {
        "save": {"raw bytes and fsync", "safetensors and fsync", "torch.save and fsync"},
        "load": {"safetensors", "torch.load"},
        "--async-save": {"a synchronous save"},
        "--snapshot-interval": {"a synchronous save"},
    }
    assert list(tmp_path.glob("tmp*")) == []


def measure_checkpoints(folder: str) -> dict[str, set[str]]:
    import tempfile

    from benchmarks.measures import checkpoints

    tempfile.tempdir, checkpoints.SHAPE = folder, TINY
    peers: dict[str, set[str]] = {}
    for result in checkpoints.measure(1):
        peers.setdefault(result.what.partition(":")[0], set()).add(result.peer)
        assert all(ratio > 0 for ratio in result.ratios)
    return peers


def test_generation_makes_the_same_text_in_every_way(run_ranks_once) -> None:
    (found,) = run_ranks_once(1, measure_generation)
    assert [peer for peer, _ in found] == ["transformers", "the suite with --recompute"]
    assert all(ratio > 0 for _, ratio in found)


def measure_generation() -> list[tuple[str, float]]:
    from benchmarks.measures import generation

    generation.SIZES = (generation.Size(layers=1, hidden=32, vocabulary=300, new=4, batches=(2,)),)
    return [(result.peer, result.ratios[0]) for result in generation.measure(1)]
