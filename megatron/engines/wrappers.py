"""DeepSpeed's wrappers of optimizers as this suite corrects them: of ZeRO 3.

That of ZeRO 1 and 2 is in ``zero.py``, with what DeepSpeed 0.19.8 does instead.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import deepspeed.runtime.engine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from megatron.engines.gradients import block_norms
from megatron.engines.overrides import expect, overrides, replaced
from megatron.engines.zero import LossScaleOfStep, ZeroOptimizer

for _module in (stage_1_and_2, stage3):
    expect(_module, "mask_nan_or_inf_with_val_inplace", "(input, device=None, val=-1.0)")


def _mark_unless_finite(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~norm.isfinite(), val)


@contextmanager
def corrected_optimizers(**options: Any) -> Iterator[None]:
    """While inside, DeepSpeed's engines make the optimizers of this module, with ``options`` of ``ZeroOptimizer``."""
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mark_unless_finite
    stage3.mask_nan_or_inf_with_val_inplace = _mark_unless_finite
    ours = partial(ZeroOptimizer, **options)
    with ExitStack() as stack:
        stack.enter_context(replaced(deepspeed.runtime.engine, DeepSpeedZeroOptimizer=ours))
        stack.enter_context(replaced(stage3, DeepSpeedZeroOptimizer_Stage3=Zero3Optimizer))
        yield


class Zero3Optimizer(LossScaleOfStep, DeepSpeedZeroOptimizer_Stage3):
    """ZeRO 3."""

    @overrides(DeepSpeedZeroOptimizer_Stage3, "(*args, **kwargs)")
    def get_grad_norm_direct(self, gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
        """2-norm [] of a parameter group's gradient over all ranks; -1 if it is not finite."""
        return super().get_grad_norm_direct([block_norms(gradient) for gradient in gradients], params, norm_type)
