"""What every rank of the tests imports: once for all of them."""

import gc
import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as launch.environment sets it, before torch is imported

import cpuinfo
import deepspeed  # noqa: F401
import deepspeed.module_inject.auto_ep_layer  # noqa: F401, which every engine imports
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401, which ZeRO 3 imports
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401, torch's compiler, which the first use of ZeRO imports
import torch
import torch._dynamo  # noqa: F401, which the first optimizer imports
import torch._subclasses.schema_check_mode  # noqa: F401, which ZeRO 3 imports
import torch.profiler._cupti_monitor  # noqa: F401, which the first profiler imports
import torch.utils.cpp_extension  # noqa: F401, setuptools, which DeepSpeed's Adam for offload imports
import torch.utils.serialization.config  # noqa: F401, which the first torch.load imports

from megatron.checkpoint import huggingface, snapshot_recovery  # noqa: F401
from megatron.cli import settings_file  # noqa: F401
from megatron.engines import containers  # noqa: F401
from megatron.model import heads, loss, moe  # noqa: F401
from megatron.parallel import shared_memory
from megatron.tools import pretraining  # noqa: F401
from megatron.tools.reporting import callbacks, tracing  # noqa: F401
from megatron.training import data_iterators, measurements, preflight, setup, trainer  # noqa: F401

# DeepSpeed's Adam for offload asks three times, for half a second of processes each.
_of_cpu = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: dict(_of_cpu)
torch.set_num_threads(1)
# Ranks of other tests want the core: one that waits sleeps at once. The ranks of launchers keep looking first.
shared_memory.SPIN_SECONDS = 0.0
# No rank looks through what all of them share, again and again, for something to collect.
gc.collect()
gc.freeze()
