"""deepspeed's launcher of one host, without torch and without messages that are no news: started on every host."""

import logging
import os
import time
from types import SimpleNamespace

from megatron.tools.cluster.deepspeed_launcher import is_news, without_torch

_LOOKS = 0.1
"""Seconds between two looks at the ranks."""


def main() -> None:
    """Start the ranks of this host, and wait for them: ``deepspeed.launcher.launch``, with its arguments."""
    without_torch(os.environ)
    from deepspeed.launcher import launch

    logging.getLogger("DeepSpeed").addFilter(is_news)
    # It looks at its ranks once a second, and in between would not end them because of one that has failed.
    launch.time = SimpleNamespace(**{**vars(time), "sleep": lambda _: time.sleep(_LOOKS)})
    launch.main()


if __name__ == "__main__":
    main()
