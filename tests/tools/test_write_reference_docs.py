"""tools/write_reference_docs.py: the generated pages in docs/ are up to date."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ROOT / "docs" / "layouts.md"
COMMAND_LINE = ROOT / "docs" / "command-line.md"
CLASSIC_FLAGS = ROOT / "docs" / "classic-flags.md"
MODELS = ROOT / "docs" / "models.md"
PARALLELISM = ROOT / "docs" / "parallelism.md"
SCHEDULES = ROOT / "docs" / "images" / "schedules.svg"
RATES = ROOT / "docs" / "images" / "learning_rates.svg"


def test_the_pages_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "write_reference_docs.py", "--output", tmp_path], check=True)
    for page in (LAYOUTS, COMMAND_LINE, CLASSIC_FLAGS, MODELS, PARALLELISM, SCHEDULES, RATES):
        written = (tmp_path / page.relative_to(ROOT / "docs")).read_text()
        assert page.read_text() == written, "run python tools/write_reference_docs.py"


def test_the_table_knows_what_deepspeed_refuses() -> None:
    """ZeRO 2 and 3 on the pipeline engine."""
    lines = [line.split("|")[1:-1] for line in LAYOUTS.read_text().splitlines() if line.startswith("|")]
    engines, rows = lines[0][1:], {name.strip(): cells for name, *cells in lines}
    for stage in range(4):
        cells = rows[f"fp32, ZeRO {stage}"]
        legal = {engine.strip(): cell == " yes " for engine, cell in zip(engines, cells, strict=True)}
        assert legal["no pipeline"] and legal["no pipeline, TP"]
        assert legal["pipeline"] == legal["DualPipeV, TP"] == (stage < 2)
