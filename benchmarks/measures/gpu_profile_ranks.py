"""Started by ``benchmarks/gpu``: torch's profile of one training step of this project on one GPU.

Reports the seconds of the step, how long the GPU computed, the share of each kind of kernel, and the longest kernels;
writes the whole profile in Chrome's trace format. On a device whose kernels torch's profiler does not record, the
figures are those of operators on the CPU.
"""

import json
import re
import sys
import time
from collections import Counter
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.measures.gpu_step_ranks import SUITE
from benchmarks.measures.ranks import report
from benchmarks.measures.shapes import Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed

WARM_UP, LONGEST = 5, 15
KINDS = {
    "communication": r"nccl|c10d|allreduce|all_gather|reduce_scatter",
    "attention": r"flash|fmha|attention|softmax",
    "matmuls": r"gemm|cublas|cutlass|matmul|addmm|::mm$|::bmm$|wgmma|s16816|nvjet|linear",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies": r"memcpy|memset|copy|::to$|fill|zero",
}
"""Pattern of each kind in the names of kernels, the first that matches; the others are norms, GELU, sums and so on."""
OTHERS = "norms, GELU, sums, loss"


def main() -> None:
    """Read the request, take the profile, report."""
    request = json.loads(sys.argv[1])
    shape, accelerator = Shape(**request["shape"]), get_accelerator()
    silence_known_warnings()
    run = run_of(shape, f"--{request['dtype']}", *SUITE[request["way"]].split())
    with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
        tokens, labels = (
            torch.randint(shape.vocabulary, (shape.batch, shape.sequence), device=accelerator.current_device_name())
            for _ in range(2)
        )
        step = engine_step(run, layout, tokens, labels)
        for _ in range(WARM_UP):
            step()
        accelerator.synchronize()
        begin = time.perf_counter()
        step()
        accelerator.synchronize()
        seconds = time.perf_counter() - begin
        activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        with profile(activities=sorted(activities, key=str), acc_events=True) as profiled:
            step()
            accelerator.synchronize()
    profiled.export_chrome_trace(request["trace"])
    report({"seconds": seconds, **summary(profiled.key_averages())})


def summary(events: Any) -> dict[str, Any]:
    """Seconds by kind of kernel, and the longest kernels, from ``key_averages()``."""
    on_gpu = (e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation)  # spans of kernels
    kernels = [(e.key, e.count, e.self_device_time_total / 1e6) for e in on_gpu]
    on_device = any(seconds for *_, seconds in kernels)
    if not on_device:
        kernels = [(e.key, e.count, e.self_cpu_time_total / 1e6) for e in events]
    kinds: Counter[str] = Counter()
    for name, _, seconds in kernels:
        kinds[kind_of(name)] += seconds
    longest = sorted(kernels, key=lambda kernel: -kernel[2])[:LONGEST]
    return {
        "on_device": on_device,
        "busy": sum(kinds.values()),
        "kinds": dict(kinds.most_common()),
        "longest": [{"name": name, "calls": calls, "seconds": seconds} for name, calls, seconds in longest],
    }


def kind_of(kernel: str) -> str:
    """One of ``KINDS``, by the name of a kernel, or OTHERS."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), OTHERS)


if __name__ == "__main__":
    main()
