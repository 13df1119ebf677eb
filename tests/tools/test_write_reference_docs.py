"""tools/write_reference_docs.py: the generated pages in docs/ are up to date."""

import subprocess
import sys
from pathlib import Path

from megatron.cli.validation import RULES
from megatron.config import flag_fields
from megatron.config.fields import flag_name
from megatron.config.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ROOT / "docs" / "layouts.md"
COMMAND_LINE = ROOT / "docs" / "command-line.md"
CLASSIC_FLAGS = ROOT / "docs" / "classic-flags.md"
MODELS = ROOT / "docs" / "models.md"
PARALLELISM = ROOT / "docs" / "parallelism.md"
SCHEDULES = ROOT / "docs" / "images" / "schedules.svg"


def test_the_pages_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "write_reference_docs.py", "--output", tmp_path], check=True)
    for page in (LAYOUTS, COMMAND_LINE, CLASSIC_FLAGS, MODELS, PARALLELISM, SCHEDULES):
        written = (tmp_path / page.relative_to(ROOT / "docs")).read_text()
        assert page.read_text() == written, "run python tools/write_reference_docs.py"


def test_the_published_numbers_of_parameters_are_on_the_page() -> None:
    page = MODELS.read_text()
    for name, preset in PRESETS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert preset.parameters is None or row.endswith(f" {preset.parameters:,} |")


def test_every_rule_is_on_the_page() -> None:
    """Those that flags state of each other are one row for each kind."""
    page = LAYOUTS.read_text()
    assert [rule.name for rule in RULES if f" | {rule.kind or rule.name}" not in page] == []


def test_the_table_knows_what_deepspeed_refuses() -> None:
    """ZeRO 2 and 3 on the pipeline engine."""
    lines = [line.split("|")[1:-1] for line in LAYOUTS.read_text().splitlines() if line.startswith("|")]
    engines, rows = lines[0][1:], {name.strip(): cells for name, *cells in lines}
    for stage in range(4):
        cells = rows[f"fp32, ZeRO {stage}"]
        legal = {engine.strip(): cell == " yes " for engine, cell in zip(engines, cells, strict=True)}
        assert legal["plain engine"] and legal["plain, TP"]
        assert legal["pipeline"] == legal["DualPipeV, TP"] == (stage < 2)


def test_every_flag_and_tool_is_in_the_reference() -> None:
    page = COMMAND_LINE.read_text()
    assert [name for field in flag_fields().values() if f"| `{(name := flag_name(field))}`" not in page] == []
    assert [path.name for path in (ROOT / "tools").glob("[a-z]*.py") if f"| `tools/{path.name}` |" not in page] == []
