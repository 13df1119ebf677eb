"""Draw the metrics files of one or more runs: loss, learning rate, gradient norm, speed and memory."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.cli.provided import read_number
from megatron.common.errors import ConfigError
from megatron.tools.command_line import ToolParser, output_file, run_tool
from megatron.tools.reporting.files import LARGEST_DRAWN, Points, read_series
from megatron.tools.reporting.pictures import CURVE_KEYS, draw_curves

FORMATS = ("png", "svg", "pdf")


def main() -> None:
    """Read the flags and the files, draw."""
    parser = ToolParser(__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", metavar="METRICS", help="files that --metrics-file wrote")
    parser.add_argument(
        "--output", type=output_file, required=True, metavar="FILE", help=f"picture to write ({', '.join(FORMATS)})"
    )
    parser.add_argument(
        "--baseline", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="loss to draw as a dashed line"
    )
    parser.add_argument("--title", default="Training", help="title of the picture")
    args = parser.parse_args()
    kind = args.output.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"--output {args.output}: the name must end in .{', .'.join(FORMATS)}")
    baselines = dict(named_losses(args.baseline))
    series = [read_series(path, CURVE_KEYS) for path in args.metrics]
    runs = dict(zip(run_names(args.metrics), series, strict=True))
    figure = draw_curves(runs, baselines, args.title)
    with atomic_file(args.output, "--output", binary=True) as file:
        figure.savefig(file, format=kind)
    print(f"{args.output}: {summary(runs)}")


def named_losses(texts: Iterable[str]) -> Iterable[tuple[str, float]]:
    """Name and number of each NAME=VALUE."""
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            number = read_number(value) if name else None
        except ValueError:
            number = None
        if number is None or abs(number) >= LARGEST_DRAWN:
            raise ConfigError(f"--baseline {text}: give NAME=VALUE with a number, such as unigram=6.2")
        yield name, number


def run_names(paths: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its path where two files have the same."""
    names = [path.stem for path in paths]
    return [
        name if names.count(name) == 1 else str(path.with_suffix("")) for name, path in zip(names, paths, strict=True)
    ]


def summary(runs: Mapping[str, Mapping[str, Points]]) -> str:
    """The last losses of each run."""
    return ", ".join(
        f"{name} {key} {loss:.4f} at iteration {iteration}"
        for name, series in runs.items()
        for key in ("lm_loss", "validation_loss")
        for iteration, loss in list(series[key].items())[-1:]
    )


if __name__ == "__main__":
    run_tool(main)
