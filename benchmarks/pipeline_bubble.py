"""The bubble that --trace measures against (p - 1) / (m + p - 1), on stages that sleep instead of computing.

Sleeping ranks need no processor, so any machine has enough of them, and every pass takes equally long: what is left
between measurement and formula is what DeepSpeed's engine and the transfers add.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.arguments import parse_run  # noqa: E402
from megatron.cli import ToolParser, run_tool  # noqa: E402
from megatron.errors import ConfigError, LaunchError  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402
from megatron.observe.trace.measure import measure  # noqa: E402
from megatron.observe.trace.timeline import read_timeline  # noqa: E402

_RANK = "PIPELINE_BUBBLE"
"""Where a rank finds what it is to do."""
_FIRST, _LAST = 2, 6
"""Iterations that count."""


def main() -> None:
    """Measure each pipeline in turn, and print a table."""
    parser = ToolParser(__doc__)
    parser.add_argument("--pipelines", nargs="+", default=["2x4", "2x8", "4x4", "4x8", "4x16"], metavar="PxM",
                        help="stages and micro-batches")  # fmt: skip
    parser.add_argument("--forward-ms", type=float, default=30.0, help="what a forward pass takes")
    parser.add_argument("--backward-ms", type=float, default=60.0, help="what a backward pass takes")
    args = parser.parse_args()
    print("| stages | micro-batches | bubble, formula | bubble, measured | busy share, measured / formula |")
    print("|---|---|---|---|---|")
    for pipeline in args.pipelines:
        stages, _, micro_batches = pipeline.partition("x")
        if not (stages.isdigit() and micro_batches.isdigit() and int(stages) * int(micro_batches)):
            raise ConfigError(f"--pipelines {pipeline}: give stages x micro-batches, such as 4x8")
        with tempfile.TemporaryDirectory() as folder:
            told = [int(stages), int(micro_batches), args.forward_ms / 1000, args.backward_ms / 1000, folder]
            _start(told)
            found = measure(read_timeline(Path(folder)))
        ratio = (1 - found.bubble) / (1 - found.theory)
        print(f"| {stages} | {micro_batches} | {found.theory:.1%} | {found.bubble:.1%} | {ratio:.3f} |", flush=True)


def _start(told: list) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(told[0]),
        __file__,
    ]
    finished = subprocess.run(command, env={**os.environ, _RANK: json.dumps(told)}, capture_output=True, text=True)
    if finished.returncode:
        raise LaunchError(f"a pipeline of {told[0]} stages could not be measured:\n{finished.stderr[-2000:]}")


def measure_rank() -> None:
    """Train on this rank, traced."""
    stages, micro_batches, forward, backward, folder = json.loads(os.environ[_RANK])
    words = (
        f"--num-layers {stages} --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 0.1 --batch-size 1 "
        f"--train-iters {_LAST} --data-path none --vocab-file none --merge-file none --pipe-parallel-size {stages} "
        f"--gas {micro_batches} --trace {folder} --trace-steps {_FIRST}:{_LAST}"
    )
    run = parse_run(words.split(), os.environ)
    prepare_environment(os.environ)

    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch import Tensor, nn

    from megatron.engine import train_batch
    from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
    from megatron.mpu.layout import distributed
    from megatron.observe.trace.recorder import Tracer

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            time.sleep(forward)
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            time.sleep(backward)
            return grad

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.scale)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(1, 8), torch.ones(1, 8)

    silence_known_warnings()
    with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
        layers = [LayerSpec(Stage) for _ in range(stages)]
        loss = nn.functional.mse_loss
        module = PipelineModule(layers, topology=layout.topology, loss_fn=loss, partition_method="uniform")
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=dict(run.ds_config)
        )  # fmt: skip
        tracer, data = Tracer(run, layout, module), batches()
        for number in range(1, _LAST + 1):
            with tracer.iteration(number) as listeners:
                train_batch(engine, data, listeners)


if __name__ == "__main__":
    run_tool(measure_rank if _RANK in os.environ else main)
