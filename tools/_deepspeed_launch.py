"""deepspeed's launcher of one host, without messages that are no news; started by tools/_deepspeed_runner.py."""

import logging

import _project_root  # noqa: F401
from deepspeed.launcher import launch
from deepspeed.utils import logger

from megatron.tools.cluster.supervise import PREEMPTED


def is_news(record: logging.LogRecord) -> bool:
    """Not: the error about a run that has saved and exits with code 75, and the warning about a single host."""
    text = record.getMessage()
    return not (text.endswith(f"exits with return code = {PREEMPTED}") or text.startswith("Unable to find hostfile"))


if __name__ == "__main__":
    logger.addFilter(is_news)
    launch.main()
