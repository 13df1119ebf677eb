"""Training steps of two ranks: this project's engines, DeepSpeed's, torch's DDP and FSDP2."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparing import Times, alternate
from benchmarks.measures.ddp import MICRO_BATCHES, OF_A_RANK, SHAPE, TOGETHER, WAYS
from benchmarks.measures.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, WithWeights
from benchmarks.measures.suite import bare_step, engine_step, run_of
from megatron.config import RunConfig
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.build import build_module
from megatron.launch.distributed import distributed
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout

Step = Callable[[], Any]
BeforePass = Callable[[bool], AbstractContextManager | None]
"""Called before each micro-batch, with whether it is the last one of a step."""
LINEAR = nn.functional.linear
"""torch's own, which DeepSpeed replaces once a model of ZeRO 3 is built."""


def measured_times(rounds: int) -> dict[str, Any]:
    """The times of each of ``WAYS`` and of its peers."""
    with _peers() as peers:
        found, ddp = {}, peers.ddp()
        for names in TOGETHER:
            own = {name: _own(name, peers) for name in names}
            ways = {f"{name}|{kind}": step for name, steps in own.items() for kind, step in steps.items()}
            times = _timed({**ways, "DDP": ddp}, rounds)
            for name, steps in own.items():
                found[name] = {kind: times[f"{name}|{kind}"] for kind in steps} | {"torch's DDP": times["DDP"]}
    return found


@contextmanager
def _peers() -> Iterator["Peers"]:
    silence_known_warnings()
    tokens, labels = torch.randint(SHAPE.vocabulary, (2, SHAPE.batch, SHAPE.sequence))  # [b, s]
    with distributed(_run().parallel) as layout, deepspeed_silenced(verbose=False):
        yield Peers(layout, tokens, labels)


def _run(*flags: str) -> RunConfig:
    return run_of(SHAPE, *flags, "--global-batch-size", str(MICRO_BATCHES))


def _own(name: str, peers: "Peers") -> dict[str, Step]:
    """The steps that train as the way of that name does."""
    run, data = _run(*WAYS[name]), (peers.tokens, peers.labels)
    with distributed(run.parallel) as layout:
        steps = {"suite": engine_step(run, layout, *data)}
        if run.parallel.pipeline_schedule == "1f1b":
            steps["bare DeepSpeed"] = bare_step(run, layout, *data)
        if run.zero.zero_stage >= 2:
            steps["torch's FSDP2"] = peers.fsdp(run)
    return steps


class Peers:
    """Plain loops over this project's model, each with a half of the micro-batches: tokens and labels [b, s]."""

    def __init__(self, layout: ParallelLayout, tokens: Tensor, labels: Tensor):
        self.layout, self.tokens, self.labels = layout, tokens, labels

    def ddp(self) -> Step:
        """torch's DDP, which reduces gradients in the last backward pass."""
        model = DistributedDataParallel(self._model())
        return self._step(model, lambda is_last: None if is_last else model.no_sync())

    def fsdp(self, run: RunConfig) -> Step:
        """FSDP2, layer by layer. Weights are sharded between steps, and at ZeRO 3 between passes, too."""
        model = self._model()
        shards_weights, once = run.zero.zero_stage == 3, run.zero.zero_coalesce_grad_reduction
        settings = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": shards_weights}
        for layer in _layers(model.modules()):
            fully_shard(layer, **settings)
        fully_shard(model, **settings)

        def before(is_last: bool) -> None:
            model.set_requires_gradient_sync(is_last or not once)
            model.set_reshard_after_backward(is_last or shards_weights)

        return self._step(model, before)

    def _model(self) -> nn.Module:
        return WithWeights(build_module(_run(), self.layout), self.labels)

    def _step(self, model: nn.Module, before: BeforePass = lambda is_last: None) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

        @patch.object(nn.functional, "linear", LINEAR)
        def step() -> None:
            for number in range(1, OF_A_RANK + 1):
                with before(number == OF_A_RANK) or nullcontext():
                    (model(self.tokens, self.labels) / OF_A_RANK).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step


def _layers(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return filter(lambda module: isinstance(module, ParallelTransformerLayer), list(modules))


def _timed(ways: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """With a barrier before and after each, so that the slower rank's time counts; CPU time of all ranks."""
    found = {}
    for name, times in alternate(ways, rounds, settle=dist.barrier).items():
        cpu = torch.tensor(times.cpu)
        dist.all_reduce(cpu)
        found[name] = asdict(Times(times.wall, cpu.tolist()))
    return found
