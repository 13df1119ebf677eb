"""The benchmark of generation runs, and finds that both write the same."""

import json
from pathlib import Path

from support.programs import Programs

TINY = "--layers 1 --hidden-size 32 --vocab-size 300 --new-tokens 4 --rounds 1 --batch-sizes 2".split()


def test_every_way_is_measured(programs: Programs, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    output = programs.python("benchmarks/generation.py", *TINY, "--json", file).ok().output
    rates = json.loads(file.read_text())["2"]
    assert set(rates) == {"suite", "suite, nothing kept", "transformers"}
    for clocks in rates.values():
        assert set(clocks) == {"clock", "processor"} and all(each[0] > 0 for each in clocks.values())
    assert "tokens/s" in output
