"""Write the figures that run.py --json, or gpu.sh, left in a folder into benchmarks/RESULTS.md.

    python benchmarks/run.py --json figures && python benchmarks/write_figures.py figures

Each table is enclosed in two comments, <!-- NAME --> and <!-- /NAME -->. The rest of the file is not changed.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.run import MEASURES  # noqa: E402
from benchmarks.tables import Row, markdown, read_json  # noqa: E402
from megatron.common.errors import ConfigError  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
TABLES = (*MEASURES, "gpu_step")
Found = dict[str, tuple[str, list[Row]]]
"""For each benchmark: the machine it was run on, and its rows."""


def main() -> None:
    """Read the folder, and write the file."""
    parser = ToolParser(__doc__)
    parser.add_argument("folder", type=Path, help="the folder that --json of run.py named")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FILE", help="where to")
    args = parser.parse_args()
    found = _read(args.folder)
    try:
        text = args.into.read_text()
    except OSError as error:
        raise ConfigError(f"--into {args.into}: {error.strerror}; name a file with marks in it") from None
    args.into.write_text(with_figures(text, found))
    print(f"wrote {', '.join(found)} into {args.into}")


def with_figures(text: str, found: Found) -> str:
    """``text`` with the tables of ``found`` between their marks. Raises ConfigError where there are no marks."""
    for name, (measured_on, rows) in found.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        if not re.search(f"{begin}.*{end}", text, re.DOTALL):
            raise ConfigError(f"no marks for {name}: put {begin.strip()} and {end.strip()} where its table belongs")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}Measured on: {measured_on}.\n\n{markdown(rows)}{end}{rest.partition(end)[2]}"
    return text


def _read(folder: Path) -> Found:
    found: Found = {}
    for name in TABLES:
        file = folder / f"{name}.json"
        if file.exists():
            try:
                _, measured_on, rows = read_json(file)
            except (OSError, json.JSONDecodeError, KeyError, TypeError):
                raise ConfigError(f"{file} is not what run.py --json writes: measure {name} again") from None
            found[name] = measured_on, rows
    if not found:
        raise ConfigError(f"{folder} has no figures: make them with benchmarks/run.py --json {folder}")
    return found


if __name__ == "__main__":
    run_tool(main)
