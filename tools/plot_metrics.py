"""Draw the metrics files of one or more runs: loss, learning rate, gradient norm and speed over the iterations."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import PICTURES, check_picture_name, write_picture

from megatron.tools.command_line import ToolParser, read_named_number, run_tool
from megatron.tools.reporting.curves import CURVE_KEYS, draw_curves
from megatron.tools.reporting.files import Points, read_series


def main() -> None:
    """Read the flags and the files, draw."""
    parser = ToolParser(__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", metavar="METRICS", help="files that --metrics-file wrote")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help=f"picture to write ({', '.join(PICTURES)})"
    )
    parser.add_argument(
        "--baseline", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="loss to draw as a dashed line"
    )
    parser.add_argument("--title", default="Training", help="title of the picture")
    args = parser.parse_args()
    check_picture_name(args.output, "--output")
    usage = "NAME=VALUE with a number, such as unigram=6.2"
    baselines = dict(read_named_number(text, "--baseline", usage) for text in args.baseline)
    series = [read_series(path, CURVE_KEYS) for path in args.metrics]
    runs = dict(zip(run_names(args.metrics), series, strict=True))
    write_picture(draw_curves(runs, baselines, args.title), args.output, "--output")
    print(f"{args.output}: {summary(runs)}")


def run_names(paths: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its path where two files have the same."""
    names = [path.stem for path in paths]
    return [
        name if names.count(name) == 1 else str(path.with_suffix("")) for name, path in zip(names, paths, strict=True)
    ]


def summary(runs: Mapping[str, Mapping[str, Points]]) -> str:
    """The last losses of each run."""
    parts = []
    for name, series in runs.items():
        for key in ("lm_loss", "validation_loss"):
            for iteration, loss in list(series[key].items())[-1:]:
                parts.append(f"{name} {key} {loss:.4f} at iteration {iteration}")
    return ", ".join(parts)


if __name__ == "__main__":
    run_tool(main)
