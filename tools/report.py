"""Write one HTML page about a run: curves, layout, plan against measurement, schedule, environment, configuration.

RUN is a folder that --run-dir wrote, or a file that --metrics-file wrote. The page is a single file and needs
no network.
"""

from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.cli.resolve import METRICS
from megatron.common.errors import ConfigError, DataError
from megatron.model.partition import TRACE
from megatron.tools.command_line import ToolParser, output_file, run_tool
from megatron.tools.reporting.files import RECORD, Record, read_expert_loads, read_record, read_series, read_timeline
from megatron.tools.reporting.page import KEYS, page, read_answers


def main() -> None:
    """Read what there is of the run, and write the page."""
    parser = ToolParser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of --run-dir, or file of --metrics-file")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="folder of --trace, if it is not RUN")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="answers that evaluate.py --predictions wrote")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="page to write (default: RUN/report.html)")
    args = parser.parse_args()
    if not args.run.exists():
        raise DataError(f"{args.run}: no such file or folder; name a folder that --run-dir wrote")
    folder = args.run if args.run.is_dir() else args.run.parent
    record, trace = folder / RECORD, args.trace or folder / TRACE
    output = args.output or folder / "report.html"
    run = read_record(record) if record.exists() else None
    metrics = _metrics(args.run, run)
    if output.resolve() in (
        path.resolve() for path in (metrics, record, trace, trace / TRACE, args.predictions) if path
    ):
        raise ConfigError(f"--output {output} is read for the page; name another file")
    text = page(
        args.run.resolve().name,
        read_series(metrics, KEYS),
        run,
        read_timeline(trace) if args.trace or trace.exists() else None,
        read_expert_loads(metrics),
        read_answers(args.predictions) if args.predictions else (),
    )
    with atomic_file(output, "--output") as file:
        file.write(text)
    print(f"{output}: {len(text) / 1e3:.0f} kB")


def _metrics(path: Path, run: Record | None) -> Path:
    """The file of metrics: ``path``, or in such a folder; with --metrics-file the run has written them elsewhere."""
    if not path.is_dir():
        return path
    named = run and run.config.get("logging", {}).get("metrics_file")
    return path / METRICS if (path / METRICS).exists() or not isinstance(named, str) else Path(named)


if __name__ == "__main__":
    run_tool(main)
