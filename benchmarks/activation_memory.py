"""Peak memory of each kind of activation checkpointing, compared with none, on this machine.

Each kind is measured on separate tensor-parallel ranks, on a GPT-2 with synthetic tokens: one training step to warm up,
then the peak memory of a second step above weights and gradients, on the rank with the highest peak. On the CPU this is
resident memory of the process (Linux); on an accelerator, what torch has allocated on it. The times are those of the
second step only: an indication, not a benchmark.

b batch, s sequence
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.resident import RETURNED_AT_ONCE, highest_since_lowered, lower_mark, resident_now  # noqa: E402
from megatron.common.errors import ConfigError, LaunchError  # noqa: E402
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

_WHOLE = {"checkpoint_activations": True}
_CUT = {**_WHOLE, "partition_activations": True}

KINDS: dict[str, ActivationConfig] = {
    "none": ActivationConfig(),
    "selective": ActivationConfig(checkpoint_activations=True, recompute_granularity="selective"),
    "full": ActivationConfig(**_WHOLE),
    "full-2-layers": ActivationConfig(**_WHOLE, checkpoint_num_layers=2),
    "full-4-layers": ActivationConfig(**_WHOLE, checkpoint_num_layers=4),
    "partitioned": ActivationConfig(**_CUT),
    "in-cpu": ActivationConfig(**_CUT, checkpoint_in_cpu=True),
    "contiguous": ActivationConfig(**_CUT, contiguous_checkpointing=True),
    "synchronized": ActivationConfig(**_WHOLE, synchronize_each_layer=True),
    "profiled": ActivationConfig(**_WHOLE, profile_backward=True),
}
"""What is measured, by name; the first is what the others are compared with."""

ATTENTION = {"fused": False, "explicit": True}
"""Kinds of attention, and whether they take --attention-softmax-in-fp32: explicit scores are what
selective recomputation saves, and the fused kernel keeps none."""


@dataclass(frozen=True)
class Measurement:
    """One kind, on the rank where it takes most."""

    attention: str
    kind: str
    peak_bytes: int
    seconds: float


def main() -> None:
    """Measure every kind, or be one rank of one kind."""
    arguments = _parser().parse_args()
    if arguments.heads % arguments.model_parallel_size:
        raise ConfigError(f"--heads {arguments.heads} is no multiple of --model-parallel-size: raise it")
    if arguments.measure:
        attention, kind = json.loads(arguments.measure)
        _measure_on_this_rank(arguments, attention, kind)
        return
    kinds = list(dict.fromkeys(["none", *arguments.kinds]))
    print(_describe(arguments))
    found: list[Measurement] = []
    for attention in arguments.attention:
        print(f"\n{attention + ' attention':<18} {'peak MiB':>9} {'of none':>8} {'step s':>7}")
        for kind in kinds:
            found.append(_measure(arguments, attention, kind))
            none = next(one for one in found if (one.attention, one.kind) == (attention, "none"))
            print(_row(found[-1], none), flush=True)
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "measure")}
        Path(arguments.json).write_text(
            json.dumps({"settings": settings, "measurements": [asdict(one) for one in found]}, indent=2) + "\n"
        )


def _row(one: Measurement, none: Measurement) -> str:
    return f"{one.kind:<18} {one.peak_bytes / 2**20:9.0f} {one.peak_bytes / none.peak_bytes:8.0%} {one.seconds:7.2f}"


def _describe(arguments: argparse.Namespace) -> str:
    return (
        f"{arguments.layers} layers, hidden {arguments.hidden_size}, {arguments.heads} heads, "
        f"{arguments.batch_size} samples of {arguments.seq_length} tokens, fp32, "
        f"tensor parallel {arguments.model_parallel_size}; memory above weights and gradients, each rank"
    )


def _measure(arguments: argparse.Namespace, attention: str, kind: str) -> Measurement:
    """Start the ranks of one kind afresh, and take the line that the first one prints."""
    processes = str(arguments.model_parallel_size)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes),
        *(__file__, *sys.argv[1:], "--measure", json.dumps([attention, kind])),
    ]
    ended = subprocess.run(command, env={**os.environ, **RETURNED_AT_ONCE}, capture_output=True, text=True)
    if ended.returncode:
        raise LaunchError(f"the ranks of {kind} failed: {(ended.stderr or ended.stdout).strip()[-2000:]}")
    answer = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"peak_bytes"')))
    return Measurement(attention, kind, **answer)


def _measure_on_this_rank(arguments: argparse.Namespace, attention: str, kind: str) -> None:
    prepare_environment(os.environ)
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from megatron.engines import deepspeed_silenced, silence_known_warnings
    from megatron.engines.containers import sequential_model
    from megatron.launch.distributed import distributed
    from megatron.parallel.tensor.random import model_parallel_manual_seed

    activation, config = KINDS[kind], _model_config(arguments, attention, kind)
    silence_known_warnings()
    with distributed(_parallel_config(arguments)) as layout:
        with deepspeed_silenced(verbose=False):
            deepspeed.checkpointing.configure(
                layout,
                partition_activations=activation.partition_activations,
                contiguous_checkpointing=activation.contiguous_checkpointing,
                num_checkpoints=config.num_layers,
                checkpoint_in_cpu=activation.checkpoint_in_cpu,
                synchronize=activation.synchronize_each_layer,
                profile=activation.profile_backward,
            )
        model_parallel_manual_seed(1, layout)
        device = get_accelerator().current_device_name()
        model = sequential_model(config, activation, layout).to(device).train()
        tokens = torch.randint(0, config.vocab_size, (arguments.batch_size, arguments.seq_length), device=device)
        targets = (tokens, torch.full(tokens.shape, 1 / tokens.numel(), device=device))  # [b, s] each
        with deepspeed_silenced(verbose=False):  # when profiling, DeepSpeed prints each layer's time
            model(tokens, targets).backward()
            model.zero_grad(set_to_none=False)
            memory = _Peak()
            begin = time.monotonic()
            model(tokens, targets).backward()
            seconds = time.monotonic() - begin
        worst = torch.tensor([memory.rise(), seconds], dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if layout.rank == 0:
            print(json.dumps({"peak_bytes": int(worst[0]), "seconds": round(worst[1].item(), 3)}))


class _Peak:
    """The highest memory since this object was made, above what was in use then."""

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        self.device = None if get_accelerator().device_name() == "cpu" else get_accelerator()
        if self.device:
            self.device.reset_peak_memory_stats()
            self.before = self.device.memory_allocated()
        else:
            lower_mark()
            self.before = resident_now()

    def rise(self) -> int:
        """In bytes."""
        return (self.device.max_memory_allocated() if self.device else highest_since_lowered()) - self.before


def _parallel_config(arguments: argparse.Namespace) -> ParallelConfig:
    size = arguments.model_parallel_size
    return ParallelConfig(model_parallel_size=size, world_size=size)


def _model_config(arguments: argparse.Namespace, attention: str, kind: str) -> ModelConfig:
    return ModelConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=4 * arguments.hidden_size,
        num_attention_heads=arguments.heads,
        max_position_embeddings=arguments.seq_length,
        vocab_size=512,  # small: logits are not what is measured
        padded_vocab_size=512,
        attention_dropout=0.0,  # with it, the fused kernel of some devices is not fused
        attention_softmax_in_fp32=ATTENTION[attention],
        recomputes_attention=KINDS[kind].recompute_granularity == "selective",
    )


def _parser() -> ToolParser:
    parser = ToolParser("Peak memory of each kind of activation checkpointing against none, on this machine.")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="transformer layers")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="size of the hidden states")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="attention heads")
    parser.add_argument("--seq-length", type=int, default=512, metavar="N", help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=2, metavar="N", help="samples")
    parser.add_argument("--model-parallel-size", type=int, default=2, metavar="N", help="ranks that share each layer")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=f"what to measure, beside none: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTION,
        default=list(ATTENTION),
        metavar="KIND",
        help="fused: the kernel that keeps no scores; explicit: step by step, as --attention-softmax-in-fp32 does",
    )
    parser.add_argument("--json", metavar="FILE", help="write the measurements there, too")
    parser.add_argument("--measure", metavar="KIND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    run_tool(main)
