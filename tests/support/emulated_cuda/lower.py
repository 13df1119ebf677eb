"""A compiled transformer layer, lowered to GPU kernels for a GPU that is absent: Inductor's Triton code, and cubins.

    python lower.py REPORT CAPABILITY TENSOR_PARALLEL_SIZE

Dynamo traces the forward and backward pass of a layer of ``--compile`` with dropout on the emulated device, Inductor
generates its kernels, and Triton compiles each of them for ``CAPABILITY``, such as 90 for sm_90. Nothing is run.
``REPORT`` becomes JSON: the number of graphs, and for each kernel what Triton made of it.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
TOKENS, HIDDEN = 128, 256


def pretend_target(capability: int) -> None:
    """Let torch and Triton take the emulated device for one of ``capability``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        """Of a GPU that is asked for its kind alone."""

        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, type_name: str) -> str:
            return type_name

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            return lambda function, **_: [1.0, 1.0, 1.0]

    triton.runtime.driver.set_active(Driver())
    numbers = {
        "name": "emulated GPU", "major": capability // 10, "minor": capability % 10, "total_memory": 80 << 30,
        "multi_processor_count": 108, "regs_per_multiprocessor": 65536, "warp_size": 32, "gcnArchName": "",
        "max_threads_per_multi_processor": 2048, "shared_memory_per_block_optin": 166912,
    }  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(**numbers)
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda._exchange_device = lambda index: 0
    torch.cuda._maybe_exchange_device = lambda index: 0  # Dynamo needs two functions
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.version.cuda = "12.9"
    torch._functorch.config.force_non_lazy_backward_lowering = True
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(torch._inductor.config, name):
            setattr(torch._inductor.config, name, False)


def generated_kernels(tensor_parallel_size: int) -> list[tuple[str, str]]:
    """Names and sources of the kernels of a layer, forward and backward."""
    from deepspeed import init_distributed

    from megatron.config import ModelConfig, ParallelConfig
    from megatron.model.transformer import ParallelTransformerLayer
    from megatron.parallel.layout import ParallelLayout
    from megatron.parallel.tensor.random import model_parallel_manual_seed

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor_parallel_size)
    init_distributed("fake", auto_mpi_discovery=False, verbose=False)
    layout = ParallelLayout.create(
        ParallelConfig(model_parallel_size=tensor_parallel_size, world_size=tensor_parallel_size)
    )
    model_parallel_manual_seed(1, layout)
    config = ModelConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=4 * HIDDEN, num_attention_heads=4, compile=True,
        max_position_embeddings=TOKENS, attention_dropout=0.1, hidden_dropout=0.1, use_cpu_initialization=True,
    )  # fmt: skip
    layer = ParallelTransformerLayer(config, layout, layer_number=1).to("cuda", torch.bfloat16)
    hidden = torch.zeros(2, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    kernels: list[tuple[str, str]] = []

    def collect(compiler: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:
        kernels.append((name, source))
        return SimpleNamespace(run=lambda *_, **__: None)

    with patch.object(AsyncCompile, "triton", collect):
        try:
            layer(hidden)
        except RuntimeError as error:  # the generated code is not meant to run here
            assert "compiled without support" in str(error), error
    return kernels


def compiled(name: str, source: str) -> list[str]:
    """What Triton makes of a kernel, such as ``ptx`` and ``cubin``."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    triton_helpers.set_driver_to_gpu = lambda: None
    module = PyCodeCache.load(f"import triton\nimport triton.language as tl\n{source}")
    tuners = [value for value in vars(module).values() if isinstance(value, triton_heuristics.CachingAutotuner)]
    tuners[0]._precompile_worker()
    return sorted(tuners[0].compile_results[0].kernel.asm)


def main(report: str, capability: str, tensor_parallel_size: str) -> None:
    """Lower the layer, and write what came of it."""
    pretend_target(int(capability))
    kernels = generated_kernels(int(tensor_parallel_size))
    found = {"graphs": counters["stats"]["unique_graphs"], "kernels": {name: compiled(name, s) for name, s in kernels}}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
