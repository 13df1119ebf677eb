"""Write the figures that run.py --json left in a folder into docs/performance.md.

    python benchmarks/run.py --json figures && python benchmarks/write_figures.py figures

Each table is enclosed in two comments, <!-- NAME --> and <!-- /NAME -->. The table of goals, <!-- goals -->, keeps the
lines of benchmarks that are not in the folder. The rest of the file is not changed.
"""

import json
import re
import sys
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.picture import draw_growth, draw_long_sequences  # noqa: E402
from benchmarks.run import GPU_MEASURES, MEASURES  # noqa: E402
from benchmarks.tables import Row, goals, markdown, read_json  # noqa: E402
from megatron.common.errors import ConfigError  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "growth.png"
DRAWN = {"growth": draw_growth, "long_sequences": draw_long_sequences}
"""Measurements with curves, each with a picture of its name."""
GOALS_HEAD = "| benchmark | compared with | goal | measured | reached |\n|---|---|---|---|---|"
Found = dict[str, tuple[str, list[Row]]]
"""By measurement: what it was made on, and its rows."""


def main() -> None:
    """Read the folder, and write the file."""
    parser = ToolParser(__doc__)
    parser.add_argument("folder", type=Path, help="what --json of run.py named")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "performance.md", metavar="FILE", help="where to")
    drawn = "where to draw the growth curves; those of other benchmarks are drawn beside it"
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help=drawn)
    args = parser.parse_args()
    found = _read(args.folder)
    try:
        text = args.into.read_text()
    except OSError as error:
        raise ConfigError(f"--into {args.into}: {error.strerror}; name a file with marks in it") from None
    args.into.write_text(with_figures(text, found))
    for name in DRAWN.keys() & found.keys():
        entries = [entry["measured"] for entry in json.loads((args.folder / f"{name}.json").read_text())["rows"]]
        file = args.picture if name == "growth" else args.picture.with_name(f"{name}.png")
        DRAWN[name]([entry for entry in entries if "points" in entry], file)
    print(f"wrote {', '.join(found)} into {args.into}")


def with_figures(text: str, found: Found) -> str:
    """``text`` with the tables of ``found`` in their places. Raises ConfigError where there is no place for one."""
    for name, (measured_on, rows) in found.items():
        text = _between(text, name, f"Measured on: {measured_on}.\n\n{markdown(rows)}")
    lines = {name: [] for name in (*MEASURES, *GPU_MEASURES)}
    for line in _content(text, "goals").splitlines()[2:]:
        lines.get(line.split("|")[1].strip(), []).append(line)
    lines |= {name: goals(name, rows) for name, (_, rows) in found.items()}
    return _between(text, "goals", "\n".join([GOALS_HEAD, *chain.from_iterable(lines.values())]))


def _read(folder: Path) -> Found:
    found: Found = {}
    for name in (*MEASURES, *GPU_MEASURES):
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


def _content(text: str, name: str) -> str:
    found = re.search(f"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL)
    if found is None:
        raise ConfigError(f"no marks for {name}: put <!-- {name} --> and <!-- /{name} --> where its table belongs")
    return found[1]


def _between(text: str, name: str, content: str) -> str:
    marks = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    return text.replace(marks[0] + _content(text, name) + marks[1], marks[0] + content + marks[1])


if __name__ == "__main__":
    run_tool(main)
