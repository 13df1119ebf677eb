"""Run a training program as one rank of many.

    with one_rank(64, 9):
        exit_code = run_program(Path("pretrain_gpt2.py"), ["--num-layers", "24", ...])

What the program would read from other ranks is answered: see ``group``. The shapes of what another pipeline stage
sends are those that the model would send itself; a step that rank 0 takes for all, such as choosing the checkpoint to
load, this rank takes, too.
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
from megatron.parallel.pipeline.simulation import Transfer
from megatron.tools.one_rank import place, replaced
from megatron.tools.one_rank.group import NAME, OneRankGroup, OneRankStore


@contextmanager
def one_rank(world_size: int, number: int, per_host: int = 8) -> Iterator[None]:
    """While inside, this process is rank ``number`` of ``world_size``, and joins no other.

    The cores of this host are not divided among the ranks that it would have: OMP_NUM_THREADS has to be set before
    torch is imported.
    """
    variables = {
        **place(world_size, number, per_host),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
        "DS_ACCELERATOR": expected_device(os.environ),
    }
    store = OneRankStore()
    with patch.dict(os.environ, variables), replaced(*_of_other_ranks(store)):
        dist.init_process_group(NAME, store=store, rank=number, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def run_program(program: Path, words: Sequence[str]) -> int:
    """The exit code of ``python PROGRAM WORDS``, which does not end this process."""

    def leave(code: int, _: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        raise SystemExit(code)

    folder = str(program.resolve().parent)
    with (
        patch.object(rank, "_exit", leave),
        patch.object(rank, "exit_with_launcher", lambda environ: None),
        patch.object(sys, "argv", [str(program), *words]),
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


def _of_other_ranks(store: OneRankStore) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and value of everything that would wait for another rank's answer."""
    for module in (dist, dist.distributed_c10d):
        yield module, "new_group", _new_group_of(dist.distributed_c10d.new_group)
        yield module, "all_gather_object", _all_gather_object
        yield module, "broadcast_object_list", _broadcast_object_list
    yield process_groups, "own_group", _own_group_of(process_groups.own_group)
    yield environment, "listen", lambda _: socket()  # nobody connects
    yield distributed, "TCPStore", lambda *_, **__: store
    yield UserError, "on_every_rank", property(lambda _: False, lambda *_: None)  # no other rank prints it
    for module in (collective_errors, zero_utils):
        yield module, "dist", _AsRank0(module.dist)
    yield collective_errors, "gathered", _gathered
    yield from _answered_shapes()


def _new_group_of(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.new_group`` of this backend, whichever is asked for."""

    def make(ranks: Sequence[int] | None = None, *arguments: Any, **options: Any) -> Any:
        made = new_group(ranks, *arguments, **(options | {"backend": NAME}))
        if (observer := OneRankGroup.observer) is not None:
            members = range(dist.get_world_size()) if ranks is None else ranks
            observer.grouped([tuple(members)], made if isinstance(made, OneRankGroup) else None)
        return made

    return make


def _own_group_of(own_group: Callable[..., Any]) -> Callable[..., Any]:
    """``own_group`` whose observer learns of the groups of all ranks."""

    def make(parts: Sequence[Sequence[int]], **options: Any) -> Any:
        observer = OneRankGroup.observer
        with patch.object(OneRankGroup, "observer", None):
            made = own_group(parts, **options)
        if observer is not None:
            alone = set(range(dist.get_world_size())).difference(*parts)
            observer.grouped([*map(tuple, parts), *((rank,) for rank in sorted(alone))], made)
        return made

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
    of = _group(group)
    root = group_src if group_src is not None else of.ranks.index(src or 0)
    of.do(lambda: None, "broadcast_object", (), (), root).wait()


def _group(group: Any) -> OneRankGroup:
    found = dist.distributed_c10d._get_default_group() if group is None else group
    assert isinstance(found, OneRankGroup)
    return found


class _AsRank0:
    """The module ``torch.distributed`` or DeepSpeed's for functions that have all ranks do or compare what rank 0 has:
    each does it that is alone."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 0) if name == "get_rank" else getattr(self._module, name)


def _answered_shapes() -> Iterator[tuple[Any, str, Any]]:
    """What answers the first transfer over each boundary between stages, which tells the shapes of later ones."""
    runs: list[RunConfig] = []
    build_module, receive = build.build_module, Transfers.receive

    def build_noted(run: RunConfig, layout: Any) -> Any:
        runs.append(run)
        return build_module(run, layout)

    def receive_answered(transfers: Any, one: Transfer) -> None:
        if not transfers.knows_shape(one):
            transfers._received_row(one.stage)
            transfers._shapes[_boundary(one)] = _shape_row(value_at(runs[-1], one))
        receive(transfers, one)

    yield build, "build_module", build_noted
    yield Transfers, "receive", receive_answered


def value_at(run: RunConfig, one: Transfer) -> Any:
    """A tensor, or the tuple of tensors, that ``one`` carries, on the meta device."""
    states = _states(run, one.boundary)
    if one.is_forward or isinstance(states, Tensor):
        return states
    return tuple(state for state in as_list(states) if state.is_floating_point())


def _states(run: RunConfig, chunk: int) -> Any:
    """What leaves model chunk ``chunk``: see ``megatron.model.transformer`` and ``megatron.model.t5``."""
    b, s, h = run.train.micro_batch_size, run.data.seq_length // run.parallel.sequence_ranks, run.model.hidden_size
    if architecture_of(run.model).is_encoder_decoder:
        hidden, r = _hidden(run, b, s, h), run.data.decoder_seq_length or 0
        if not _is_after_encoder(run, chunk):
            return hidden, _whole_numbers(b, s), _whole_numbers(b, r)
        return _hidden(run, b, r, h), hidden, _whole_numbers(b, s)
    is_merged = any(layer.class_name == "ImageEmbedding" for layer in _layers_until(run, chunk))
    if run.model.vision_num_layers and not is_merged:
        images = _hidden(run, run.model.image_slots, run.model.encoder_tokens, run.model.vision_hidden_size)
        return images, _whole_numbers(b, 2, run.data.seq_length)
    shards = run.parallel.model_parallel_size if run.parallel.sequence_parallel else 1
    sizes = (b, s // shards) if run.model.sequence_dim == 1 else (s // shards, b)
    hidden = _hidden(run, *sizes, h)
    has_ids = run.model.layers_need_segment_ids or architecture_of(run.model).masked_lm
    return (hidden, _whole_numbers(b, s)) if has_ids else hidden


def _hidden(run: RunConfig, *sizes: int) -> Tensor:
    is_whole = run.precision.dtype == "fp32" or run.model.fp32_residual_connection
    dtype = torch.float32 if is_whole else torch.bfloat16 if run.precision.dtype == "bf16" else torch.float16
    return torch.empty(sizes, dtype=dtype, device="meta")


def _whole_numbers(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int32, device="meta")


def _layers_until(run: RunConfig, chunk: int) -> Sequence[LayerSpec]:
    """The layers of the chunk and of those before it."""
    end = partition_boundaries(layers_per_chunk(run), run.model)[chunk + 1]
    return architecture_of(run.model).layers(run.model)[:end]


def _is_after_encoder(run: RunConfig, chunk: int) -> bool:
    """Whether the chunk ends after the embedding of the decoder, the second use of the table."""
    layers = _layers_until(run, chunk)
    return sum(layer.tied == EMBED or layer.module.endswith("Embedding") for layer in layers) > 1
