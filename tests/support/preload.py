"""What every rank of the tests imports: once for all of them."""

import deepspeed  # noqa: F401
import torch

from megatron import training  # noqa: F401

torch.set_num_threads(1)
