"""A package ``apex`` in plain torch, with the interface of NVIDIA's (github.com/NVIDIA/apex)."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "package"
"""The folder that ``import apex`` has to find."""


def install(*, auto: bool = False) -> None:
    """Make ``import apex`` work in this process, which has imported DeepSpeed already.

    ``auto``: let ``--fused-kernels auto`` choose apex's Adam on the CPU, where it otherwise takes torch's.
    """
    from deepspeed.runtime.zero import utils

    sys.path.insert(0, str(PACKAGE))
    from apex.optimizers import FusedAdam

    utils.ZERO_SUPPORTED_OPTIMIZERS.append(FusedAdam)  # which DeepSpeed does if it finds apex
    if auto:
        from megatron.engines import optimizers

        optimizers.uses_apex = lambda fused_kernels: fused_kernels == "auto"
