"""Runs a training program as one rank of many.

    with one_rank(64, 9):
        exit_code = run_program(Path("pretrain_gpt2.py"), ["--num-layers", "24", ...])

Results of collectives are faked: see ``group``. Tensors received from other pipeline stages have the shapes that the
model would send. What rank 0 does for all ranks, such as choosing the checkpoint to load, this rank does itself.
"""

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import utils as zero_utils
from torch import Tensor

from megatron.checkpoint import collective_errors
from megatron.common.environment import expected_device
from megatron.common.errors import UserError
from megatron.config import RunConfig
from megatron.engines import build
from megatron.engines.transfers import Transfers, _boundary, _shape_row, as_list
from megatron.launch import distributed, environment, rank
from megatron.model.architectures import architecture_of
from megatron.model.architectures.layers import EMBED
from megatron.model.partition import layers_per_chunk, partition_boundaries
from megatron.model.spec import LayerSpec
from megatron.parallel import process_groups
from megatron.parallel.pipeline.program import Transfer
from megatron.tools.one_rank import patched, rank_environment
from megatron.tools.one_rank.group import NAME, OneRankGroup, OneRankStore


@contextmanager
def one_rank(world_size: int, number: int, per_host: int = 8) -> Iterator[None]:
    """Context in which this process is rank ``number`` of ``world_size``, without connecting to other ranks.

    The cores of this host are not divided among its ranks: set OMP_NUM_THREADS before torch is imported.
    """
    variables = {
        **rank_environment(world_size, number, per_host),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
        "DS_ACCELERATOR": expected_device(os.environ),
    }
    store = OneRankStore()
    with patch.dict(os.environ, variables), patched(*_patches_of_other_ranks(store)):
        dist.init_process_group(NAME, store=store, rank=number, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def run_program(program: Path, arguments: Sequence[str]) -> int:
    """Run ``python PROGRAM ARGUMENTS`` in this process. Returns its exit code."""

    def leave(code: int, _: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        raise SystemExit(code)

    folder = str(program.resolve().parent)
    with (
        patch.object(rank, "_exit", leave),
        patch.object(rank, "exit_with_launcher", lambda environ: None),
        patch.object(sys, "argv", [str(program), *arguments]),
        patch.object(sys, "path", [folder, *sys.path]),
    ):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _create(options: Any, _: Any) -> OneRankGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return OneRankGroup(options.group_rank, ranks, options.group_id)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _patches_of_other_ranks(store: OneRankStore) -> Iterator[tuple[Any, str, Any]]:
    """Patches (owner, name, value) of everything that would wait for another rank."""
    for module in (dist, dist.distributed_c10d):
        yield module, "new_group", _with_this_backend(dist.distributed_c10d.new_group)
        yield module, "all_gather_object", _all_gather_object
        yield module, "broadcast_object_list", _broadcast_object_list
    yield process_groups, "own_group", _observed_own_group(process_groups.own_group)
    yield environment, "listen", lambda _: socket()  # no rank connects
    yield distributed, "TCPStore", lambda *_, **__: store
    yield UserError, "on_every_rank", property(lambda _: False, lambda *_: None)  # rank 0 does not exist to print it
    for module in (collective_errors, zero_utils):
        yield module, "dist", _AsRank0(module.dist)
    yield collective_errors, "gathered", _gathered
    yield from _patches_of_shapes()


def _with_this_backend(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.new_group`` that always uses this backend, and notifies the observer."""

    def make(ranks: Sequence[int] | None = None, *arguments: Any, **options: Any) -> Any:
        group = new_group(ranks, *arguments, **(options | {"backend": NAME}))
        if (observer := OneRankGroup.observer) is not None:
            members = range(dist.get_world_size()) if ranks is None else ranks
            observer.grouped([tuple(members)], group if isinstance(group, OneRankGroup) else None)
        return group

    return make


def _observed_own_group(own_group: Callable[..., Any]) -> Callable[..., Any]:
    """``own_group`` that notifies the observer of the groups of all ranks."""

    def make(parts: Sequence[Sequence[int]], **options: Any) -> Any:
        observer = OneRankGroup.observer
        with patch.object(OneRankGroup, "observer", None):
            group = own_group(parts, **options)
        if observer is not None:
            singles = set(range(dist.get_world_size())).difference(*parts)
            observer.grouped([*map(tuple, parts), *((rank,) for rank in sorted(singles))], group)
        return group

    return make


def _all_gather_object(objects: list, value: Any, group: Any = None) -> None:
    def deliver() -> None:
        objects[:] = [value] * len(objects)

    _group(group).do(deliver, "all_gather_object").wait()


def _gathered(own: list) -> list:
    _group(None).do(lambda: None, "gather_object", (), (), 0).wait()
    return own * dist.get_world_size()


def _broadcast_object_list(
    objects: list, src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
) -> None:
    process_group = _group(group)
    root = group_src if group_src is not None else process_group.ranks.index(src or 0)
    process_group.do(lambda: None, "broadcast_object", (), (), root).wait()


def _group(group: Any) -> OneRankGroup:
    """``group``, or the default group for None."""
    process_group = dist.distributed_c10d._get_default_group() if group is None else group
    assert isinstance(process_group, OneRankGroup)
    return process_group


class _AsRank0:
    """``torch.distributed`` or DeepSpeed's ``dist`` with rank 0, for functions in which rank 0 acts for all ranks."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 0) if name == "get_rank" else getattr(self._module, name)


def _patches_of_shapes() -> Iterator[tuple[Any, str, Any]]:
    """Patches that fake the first transfer between each pair of stages, which has the shapes of later transfers."""
    runs: list[RunConfig] = []
    build_module, receive = build.build_module, Transfers.receive

    def record_run(run: RunConfig, layout: Any) -> Any:
        runs.append(run)
        return build_module(run, layout)

    def receive_with_shape(transfers: Any, transfer: Transfer) -> None:
        if not transfers.knows_shape(transfer):
            transfers._received_row(transfer.stage)
            transfers._shapes[_boundary(transfer)] = _shape_row(transferred_value(runs[-1], transfer))
        receive(transfers, transfer)

    yield build, "build_module", record_run
    yield Transfers, "receive", receive_with_shape


def transferred_value(run: RunConfig, transfer: Transfer) -> Any:
    """The tensor or tuple of tensors that ``transfer`` sends, on the meta device."""
    states = _states(run, transfer.boundary)
    if transfer.is_forward or isinstance(states, Tensor):
        return states
    return tuple(state for state in as_list(states) if state.is_floating_point())


def _states(run: RunConfig, chunk: int) -> Any:
    """The output of model chunk ``chunk``: see ``megatron.model.transformer`` and ``megatron.model.t5``."""
    b, s, h = run.train.micro_batch_size, run.data.seq_length // run.parallel.sequence_ranks, run.model.hidden_size
    if architecture_of(run.model).is_encoder_decoder:
        hidden, r = _hidden(run, b, s, h), run.data.decoder_seq_length or 0
        if not _is_after_encoder(run, chunk):
            return hidden, _ids(b, s), _ids(b, r)
        return _hidden(run, b, r, h), hidden, _ids(b, s)
    is_merged = any(layer.class_name == "ImageEmbedding" for layer in _layers_until(run, chunk))
    if run.model.vision_num_layers and not is_merged:
        images = _hidden(run, run.model.image_slots, run.model.encoder_tokens, run.model.vision_hidden_size)
        return images, _ids(b, 2, run.data.seq_length)
    shards = run.parallel.model_parallel_size if run.parallel.sequence_parallel else 1
    sizes = (b, s // shards) if run.model.sequence_dim == 1 else (s // shards, b)
    hidden = _hidden(run, *sizes, h)
    has_ids = run.model.layers_need_segment_ids or architecture_of(run.model).masked_lm
    return (hidden, _ids(b, run.data.seq_length)) if has_ids else hidden  # the ids of all ranks of a ring


def _hidden(run: RunConfig, *sizes: int) -> Tensor:
    is_fp32 = run.precision.dtype == "fp32" or run.model.fp32_residual_connection
    dtype = torch.float32 if is_fp32 else torch.bfloat16 if run.precision.dtype == "bf16" else torch.float16
    return torch.empty(sizes, dtype=dtype, device="meta")


def _ids(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int32, device="meta")


def _layers_until(run: RunConfig, chunk: int) -> Sequence[LayerSpec]:
    """The layers of model chunk ``chunk`` and of the chunks before it."""
    end = partition_boundaries(layers_per_chunk(run), run.model)[chunk + 1]
    return architecture_of(run.model).layers(run.model)[:end]


def _is_after_encoder(run: RunConfig, chunk: int) -> bool:
    """Whether the chunk ends after the decoder's embedding, the second layer that uses the word embedding."""
    layers = _layers_until(run, chunk)
    return sum(layer.tied == EMBED or layer.module.endswith("Embedding") for layer in layers) > 1
