"""A plan in words and figures, for the screen and for JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron.tools.planning.memory import Memory, stage_memory
from megatron.tools.planning.presets import GB, TERA, in_words
from megatron.tools.planning.request import Request
from megatron.tools.planning.search import Candidate, Plan

_COLUMNS = (
    "", "TP", "PP", "DP", "ZeRO", "SP", "recompute", "micro", "gas", "memory GB", "bubble",
    "sent GB", "step s", "TFLOP/s", "MFU", "days",
)  # fmt: skip


def describe_plan(plan: Plan, request: Request, top: int) -> Iterator[str]:
    """The ranked table, and what is against the others; a line each."""
    yield describe_request(request)
    yield (
        f"{plan.looked_at:,} layouts: {len(plan.fitting):,} fit, {len(plan.too_large):,} take more memory, "
        f"{sum(rejection.layouts for rejection in plan.rejections):,} break a rule"
    )
    shown = plan.fitting[:top] or plan.too_large[:1]
    if plan.fitting:
        yield from ("", *_table([_COLUMNS, *(_row(number, one) for number, one in enumerate(shown, 1))]))
    elif shown:
        yield f"\nnothing fits; the smallest takes {in_words(shown[0].memory.total)}:"
        yield from _table([_COLUMNS, _row(1, shown[0])])
    yield from ("", *_against(plan, request))


def describe_candidate(one: Candidate, memories: Sequence[Memory]) -> Iterator[str]:
    """One layout's memory by stage, its time and its traffic."""
    yield "memory of a rank of each stage"
    yield from stage_table(memories)
    yield f"\nof {one.timing.total:.3g} s a step: {_shares(one)}"
    yield f"a rank sends at most, each step: {_sent(one)}"


def describe_request(request: Request) -> str:
    """What was asked for, in a line."""
    device = request.machine.device
    per_node, intra, inter = request.machine.per_node, device.intra_bandwidth / GB, device.inter_bandwidth / GB
    return (
        f"{request.devices:,} devices, {per_node} a host: {in_words(device.memory)} each, of which "
        f"{in_words(request.room)} are used, {device.peak_flops / TERA:g} TFLOP/s in 16-bit, {intra:g} GB/s on a host, "
        f"{inter:g} GB/s between hosts; {request.tokens:.3g} tokens"
    )


_MOST_ROWS = 12


def stage_table(memories: Sequence[Memory]) -> list[str]:
    """Where the memory goes, a row for each run of stages that are alike; of many rows the first and the last."""
    rows, first = [], 0
    for number, memory in enumerate(memories):
        if number + 1 < len(memories) and memories[number + 1] == memory:
            continue
        name = str(number) if first == number else f"{first}-{number}"
        amounts = [in_words(amount) for amount in (*memory.parts().values(), memory.total)]
        rows.append((name, f"{memory.parameters:,}", str(memory.working.in_flight), *amounts))
        first = number + 1
    if len(rows) > _MOST_ROWS:
        rows = [*rows[: _MOST_ROWS // 2], ["..."] + [""] * (len(rows[0]) - 1), *rows[-_MOST_ROWS // 2 :]]
    return _table([("stage", "parameters", "in flight", *memories[0].parts(), "total"), *rows])


def as_json(plan: Plan, request: Request, top: int) -> dict[str, Any]:
    """The same figures, all layouts that fit included; bytes, seconds and shares."""
    return {
        "devices": request.devices,
        "room_bytes": request.room,
        "tokens": request.tokens,
        "looked_at": plan.looked_at,
        "fitting": [_as_json(one, with_stages=number < top) for number, one in enumerate(plan.fitting)],
        "too_large": [_as_json(one, with_stages=False) for one in plan.too_large],
        "rejections": [asdict(rejection) for rejection in plan.rejections],
    }


def _as_json(one: Candidate, *, with_stages: bool) -> dict[str, Any]:
    found = {
        **layout_of(one),
        "memory_bytes": {**one.memory.parts(), "total": one.memory.total},
        "bubble": one.bubble,
        "sent_bytes": asdict(one.traffic),
        "links": _links(one),
        "seconds": {**asdict(one.timing), "total": one.timing.total},
        "flops_per_device": one.flops_per_device,
        "mfu": one.mfu,
        "days": one.days,
        "arguments": one.command,
    }
    if with_stages:
        stages = stage_memory(one.run)
        found["stages"] = [{"parameters": stage.parameters, **stage.parts(), "total": stage.total} for stage in stages]
    return found


def layout_of(one: Candidate) -> dict[str, Any]:
    """What makes a layout, by name."""
    run, parallel = one.run, one.run.parallel
    return {
        "tensor_parallel": parallel.model_parallel_size,
        "pipeline_parallel": parallel.pipe_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "zero_stage": run.zero.zero_stage,
        "sequence_parallel": parallel.sequence_parallel,
        "recompute": run.activation.recompute_granularity,
        "micro_batch_size": run.train.micro_batch_size,
        "gradient_accumulation_steps": run.train.gradient_accumulation_steps,
    }


def _row(number: int, one: Candidate) -> tuple[str, ...]:
    t, p, d, zero, cut, recompute, micro, gas = layout_of(one).values()
    return (
        *map(str, (number, t, p, d, zero)), "yes" if cut else "no", recompute or "none", str(micro), str(gas),
        f"{one.memory.total / GB:.1f}", f"{one.bubble:.1%}", f"{one.traffic.total / GB:.3g}", f"{one.timing.total:.3g}",
        f"{one.flops_per_device / TERA:.3g}", f"{one.mfu:.1%}", f"{one.days:.3g}",
    )  # fmt: skip


def _shares(one: Candidate) -> str:
    total = one.timing.total
    return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in asdict(one.timing).items())


def _sent(one: Candidate) -> str:
    links = _links(one)
    return ", ".join(f"{name} {in_words(amount)} ({links[name]})" for name, amount in asdict(one.traffic).items())


def _links(one: Candidate) -> dict[str, str]:
    """Where each kind of traffic goes: ranks of a group whose numbers span more than a host need its network."""
    parallel, per_node = one.run.parallel, one.request.machine.per_node
    inner = parallel.model_parallel_size * parallel.ds_sequence_parallel_size
    replicas = inner * parallel.data_parallel_size
    spans = {"tensor": inner, "pipeline": replicas * parallel.pipe_stages, "data": replicas}
    return {name: "on a host" if span <= per_node else "between hosts" for name, span in spans.items()}


def _against(plan: Plan, request: Request) -> Iterator[str]:
    """Why the others are not in the table."""
    if plan.too_large:
        nearest = plan.too_large[0]
        yield (
            f"{len(plan.too_large):6,}  take more than {in_words(request.room)}; the smallest of them "
            f"{in_words(nearest.memory.total)}"
        )
    for rejection in plan.rejections:
        yield f"{rejection.layouts:6,}  {rejection.reason}; such as: {rejection.example}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
