"""Run on each of two ranks by ``step_profile.py``: where the time of the steps of ``ddp.py`` goes."""

import os
import sys

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Report the seconds of rank 0 by kind of operator, of each implementation and round."""
    prepare_environment(os.environ)  # before torch is imported
    from benchmarks.measures.ddp_ways import measured_profiles
    from benchmarks.measures.ranks import report

    found = measured_profiles(int(sys.argv[1]))
    if os.environ["RANK"] == "0":
        report(found)


main()
