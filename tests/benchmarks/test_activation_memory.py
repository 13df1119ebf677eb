"""The benchmark of activation memory runs, and finds that recomputation takes less."""

import json
from pathlib import Path

from support.programs import Programs

TINY = "--layers 4 --hidden-size 64 --heads 4 --seq-length 256 --batch-size 4 --model-parallel-size 1".split()


def test_recomputation_takes_less_memory(programs: Programs, tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    words = [*TINY, "--attention", "explicit", "--kinds", "full", "--json", file]
    output = programs.python("benchmarks/activation_memory.py", *words).ok().output
    none, full = json.loads(file.read_text())["measurements"]
    assert (none["kind"], full["kind"]) == ("none", "full")
    assert full["peak_bytes"] < 0.7 * none["peak_bytes"]
    assert "explicit attention" in output and "100%" in output


def test_unknown_kind_is_refused(programs: Programs) -> None:
    ended = programs.python("benchmarks/activation_memory.py", "--kinds", "half")
    assert ended.returncode == 2
    assert "invalid choice: 'half'" in ended.output and "Traceback" not in ended.output
