"""The benchmark of checkpoints runs, measures every way, and leaves nothing behind."""

import json
from pathlib import Path

from support.programs import Programs

TINY = "--layers 1 --hidden-size 32 --rounds 1".split()


def test_every_way_is_measured(programs: Programs, tmp_path: Path) -> None:
    disk, file = tmp_path / "disk", tmp_path / "figures.json"
    disk.mkdir()
    words = [*TINY, "--folder", disk, "--json", file]
    output = programs.python("benchmarks/checkpoint_bandwidth.py", *words).ok().output
    figures = json.loads(file.read_text())
    assert set(figures["save_seconds"]) == {"suite", "torch", "torch+sync", "raw"}
    assert set(figures["load_seconds"]) == {"suite", "torch", "raw"}
    assert set(figures["wait_seconds"]) == {"save", "--async-save", "--async-save, until written"}
    assert figures["bytes"] > 12 * 1024 * 32  # at the least the embedding, in fp32, and its two moments
    assert "MB/s, save" in output and list(disk.iterdir()) == []
