"""Run a program as one of several ranks."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron.errors import ConfigError, UserError
from megatron.launch.launcher import check_place
from megatron.launch.launcher import rank as rank_of


def run_rank(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` as one of several ranks and leave the process with its exit code.

    What every rank sees before they have joined is said by the first alone. Behind that the rank that
    fails says so, and leaves at once, without waiting for others in the middle of a collective.
    """
    rank = _rank()
    try:
        main()
    except UserError as error:
        joined = _has_joined()
        if joined or rank == 0:
            for message in error.messages:
                print(
                    f"pretrain_gpt2.py: error: {f'rank {rank}: ' if joined else ''}{message}",
                    file=sys.stderr,
                    flush=True,
                )
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        print(f"pretrain_gpt2.py: rank {rank} failed:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0)


def _rank() -> int:
    try:
        check_place(os.environ)
    except ConfigError:
        return 0  # nobody else may be there to say it
    return rank_of(os.environ) or 0


def _has_joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()
