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
from megatron.tools.reporting.files import RECORD, read_expert_loads, read_record, read_series, read_timeline
from megatron.tools.reporting.page import KEYS, page, read_answers


def main() -> None:
    """Read what there is of the run, and write the page."""
    parser = ToolParser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of --run-dir, or file of --metrics-file")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="folder of --trace, if it is not RUN")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="answers that evaluate.py --predictions wrote")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="page to write (default: RUN/report.html)")
    args = parser.parse_args()
    output = args.output or (args.run if args.run.is_dir() else args.run.parent) / "report.html"
    metrics = args.run / METRICS if args.run.is_dir() else args.run
    if not args.run.exists():
        raise ConfigError(f"{args.run}: no such file or folder; name a folder that --run-dir wrote")
    record, trace = metrics.parent / RECORD, args.trace or metrics.parent / TRACE
    if output.resolve() in (
        path.resolve() for path in (metrics, record, trace, trace / TRACE, args.predictions) if path
    ):
        raise ConfigError(f"--output {output} is read for the page; name another file")
    try:
        series, loads = read_series(metrics, KEYS), read_expert_loads(metrics)
    except DataError as error:
        raise ConfigError(error.messages) from error
    text = page(
        args.run.resolve().name,
        series,
        read_record(record) if record.exists() else None,
        read_timeline(trace) if args.trace or trace.exists() else None,
        loads,
        read_answers(args.predictions) if args.predictions else (),
    )
    with atomic_file(output, "--output") as file:
        file.write(text)
    print(f"{output}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    run_tool(main)
