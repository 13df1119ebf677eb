"""Everything that replaces or works around a part of DeepSpeed or torch.distributed.

Each entry states where the part is in DeepSpeed ``TESTED_VERSION``, what it does there, the test that fails without
the entry, and when the entry can be removed. Nothing outside of this package replaces attributes of DeepSpeed's
objects.
"""

import sys

TESTED_VERSION = "0.19.8"
"""The version of DeepSpeed that the entries are for."""


def warn_if_untested_version(*, is_main_rank: bool) -> None:
    """Print one warning on the main rank if DeepSpeed has another version than the tested one."""
    import deepspeed

    if is_main_rank and deepspeed.__version__ != TESTED_VERSION:
        print(
            f"warning: DeepSpeed {deepspeed.__version__} is installed, but this suite was tested with "
            f"{TESTED_VERSION}, parts of which it replaces: see megatron/parallel/deepspeed_compat",
            file=sys.stderr,
            flush=True,
        )
