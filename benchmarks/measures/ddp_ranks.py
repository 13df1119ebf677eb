"""Run on each of two ranks by ``ddp.py``: all implementations in alternation."""

import os
import sys

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Report wall-clock time, and CPU time of both ranks together, of each implementation."""
    prepare_environment(os.environ)  # before torch is imported
    from benchmarks.measures.ddp_ways import measured_times
    from benchmarks.measures.ranks import report

    found = measured_times(int(sys.argv[1]))
    if os.environ["RANK"] == "0":
        report(found)


main()
