"""Check hosts and arguments by a strict grammar, then start DeepSpeed's launcher with the same arguments.

    python tools/launch.py --hostfile hostfile -i worker-1:0,1@worker-2 pretrain_gpt2.py ARGUMENTS

Takes the flags of the deepspeed command. The exit code is the launcher's, 128 + N if signal N ended it; processes that
it leaves on this host are ended. With --max-restarts N a failed run is restarted from its newest checkpoint; exit code
93: it failed three times in a row without a new one. With --elastic it is restarted on the hosts that are healthy then:
spare hosts of the hostfile replace lost ones, or else the planner chooses a layout for the remaining hosts.
"""

import os
import signal
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import _project_root  # noqa: F401

from megatron.common.screen import ignore_lost_output
from megatron.launch.host_limits import check_host
from megatron.tools.cluster.elastic import TooFewHostsError, announce, run_elastic
from megatron.tools.cluster.elastic_run import ElasticRun
from megatron.tools.cluster.launch_flags import read_launch
from megatron.tools.cluster.launching import (
    check_arguments,
    checkpoint_folder,
    launcher_arguments,
    newest_checkpoint,
)
from megatron.tools.cluster.remote import ssh_options_for_pdsh
from megatron.tools.cluster.supervise import FORWARDED, HELPER, PREEMPTED, run_with_restarts, supervise
from megatron.tools.command_line import run_tool

RUNNER = Path(__file__).with_name("_deepspeed_runner.py")


def main() -> None:
    """Check, start, wait, clean up; again if the run failed and may be restarted."""
    ignore_lost_output()  # which would otherwise end the run with its launcher
    launch = read_launch(sys.argv[1:], __doc__)
    if launch.elastic:
        sys.exit(_run_elastic(launch))
    command = [sys.executable, str(RUNNER), *launcher_arguments(launch, os.environ)]
    folder = checkpoint_folder(launch.arguments) if launch.max_restarts else Path()
    check_arguments(launch, os.environ)
    check_host(os.environ)  # before DeepSpeed's launcher, which needs the same
    environ = {**os.environ, **ssh_options_for_pdsh(os.environ)}
    progress = partial(newest_checkpoint, folder)
    sys.exit(run_with_restarts(lambda: supervise(command, environ), progress, launch.max_restarts))


def _run_elastic(launch: Namespace) -> int:
    """The exit code of the last start."""
    run = ElasticRun(launch, os.environ, [sys.executable, str(RUNNER)])
    for number in FORWARDED:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            # Between two starts, where there is nothing to save; during one it is forwarded.
            signal.signal(number, lambda *_: sys.exit(PREEMPTED))
    is_over = True
    os.environ[HELPER] = "1"  # what looks at hosts is not ended with a start
    try:
        if not launch.standby:
            run.lock.take()
        elif not run.lock.take_over():
            announce("the other agent has ended the run")
            return 0
        return run_elastic(run)
    except TooFewHostsError:  # can be reached from here: this host may be cut off, and a standby takes over
        is_over = False
        raise
    finally:
        if is_over:
            run.lock.release()  # otherwise a standby would start the run again


if __name__ == "__main__":
    run_tool(main)
