"""The measurement of checkpoints compares every variant, and leaves no files."""

from pathlib import Path

from benchmarks.measures.peers import Shape

TINY = Shape(layers=1, hidden=32, heads=2, sequence=16, batch=1, vocabulary=128)


def test_every_variant_is_measured(run_ranks_once, tmp_path: Path) -> None:
    (peers,) = run_ranks_once(1, measure_tiny, str(tmp_path))
    assert peers == {
        "save": {
            "raw bytes and fsync",
            "hashes beside writing",
            "safetensors and fsync",
            "torch.save and fsync",
            "torch.save alone, without a disk",
            "SHA-256 alone",
            "CRC-32 alone",
        },
        "load": {
            "safetensors",
            "safetensors after xxHash",
            "torch.load, mapped, after xxHash",
            "torch.load",
            "reading bytes",
        },
        "load, unverified": {"safetensors", "torch.load, mapped"},
        "load from a cold cache": {"reading bytes"},
        "--async-save": {"a synchronous save", "copying the state alone"},
        "--snapshot-interval": {"a synchronous save", "copying the state alone", "the plan"},
    }
    assert list(tmp_path.glob("tmp*")) == []


def measure_tiny(folder: str) -> dict[str, set[str]]:
    import tempfile

    from benchmarks.measures import checkpoints

    tempfile.tempdir, checkpoints.SHAPE = folder, TINY
    peers: dict[str, set[str]] = {}
    for result in checkpoints.measure(1):
        peers.setdefault(result.what.partition(":")[0], set()).add(result.peer)
        assert all(ratio > 0 for ratio in result.ratios)
    return peers
