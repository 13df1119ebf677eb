"""tools/write_layout_docs.py: the page in docs/ is what the rules say."""

import subprocess
import sys
from pathlib import Path

from megatron.config.validation import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "layouts.md"


def test_the_page_is_what_the_rules_say(tmp_path: Path) -> None:
    written = tmp_path / "layouts.md"
    subprocess.run([sys.executable, ROOT / "tools" / "write_layout_docs.py", "--output", written], check=True)
    assert PAGE.read_text() == written.read_text(), "run python tools/write_layout_docs.py"


def test_every_rule_is_on_the_page() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in lines if line[2:3].isdigit()] == [
        f"| {number} | {rule.name} | {rule.why} | {rule.otherwise} |" for number, rule in enumerate(RULES, start=1)
    ]


def test_the_table_knows_what_deepspeed_refuses() -> None:
    """ZeRO 2 and 3 on the pipeline engine."""
    lines = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    engines, rows = lines[0][1:], {name.strip(): cells for name, *cells in lines}
    for stage in range(4):
        cells = rows[f"fp32, ZeRO {stage}"]
        legal = {engine.strip(): cell == " yes " for engine, cell in zip(engines, cells, strict=True)}
        assert legal["plain engine"] and legal["plain, TP"]
        assert legal["pipeline"] == legal["DualPipeV, TP"] == (stage < 2)
