"""Ranks are extracted one by one; each planted fault is found, and its words name the ranks and the operation."""

import itertools
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.programs import Programs
from support.ranks import in_new_process

from megatron.cli import read_run
from megatron.common.errors import ConfigError
from megatron.model.architectures import GPT2
from megatron.tools.communication.check import Call, Counterexample, Event, Issue, Trace, Wait, check, programs
from megatron.tools.communication.request import make_starts

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt2.py"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data"
    " --vocab-size 512 --batch-size 2 --gas 2 --train-iters 2 --eval-iters 1 --num-workers 0 --lr 1e-3 --zero-stage 1"
    " --bf16 --model-parallel-size 2 --pipe-parallel-size 2"
).split()


def prepare_nothing(rank: int) -> None: ...


def skip_of_empty_batches(rank: int) -> None:
    """The loss is summed only where there is one."""
    import torch.distributed as dist

    all_reduce = dist.all_reduce

    def skipped(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return None if tensor.numel() == 64 and bool((tensor == 0).all()) else all_reduce(tensor, *arguments, **options)

    dist.all_reduce = skipped


def take_without_a_wait(rank: int) -> None:
    """What a stage receives is used at once."""
    from megatron.engines.transfers import Transfers

    Transfers.take = lambda transfers, one: transfers._arriving.pop(one)[1]


def use_a_bucket_again(rank: int) -> None:
    """Gradients are set to zero while they are reduced."""
    from megatron.engines.gradients import GradientBucket

    start = GradientBucket.start

    def started(bucket: GradientBucket) -> None:
        start(bucket)
        bucket._flat.zero_()

    GradientBucket.start = started


def extract_ranks(folder: Path, ranks: Sequence[int], prepare: Callable[[int], None], empty: bool) -> list[Trace]:
    from megatron.tools.communication.extract import Job, extract

    traces = extract(Job(PROGRAM, FLAGS, 8, folder, prepare, empty), ranks, 2)
    return sorted(traces, key=lambda trace: trace.rank)


def extracted(folder: Path, ranks: Sequence[int], prepare: Any = prepare_nothing, empty: bool = False) -> list[Trace]:
    """The traces of ``ranks`` of 8, in order."""
    return in_new_process(extract_ranks, folder, ranks, prepare, empty)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """Of all 8 ranks: the second data-parallel rank of each is the first one."""
    own = extracted(tmp_path_factory.mktemp("traces"), [0, 1, 4, 5])
    return [own[0], own[1], own[0], own[1], own[2], own[3], own[2], own[3]]


def changed(traces: list[Trace], rank: int, change: Callable[[list[Event]], None]) -> str:
    """Why ranks hang if ``change`` is made to the events of ``rank``."""
    changed = deepcopy(traces[rank])
    change(changed.threads["main"])
    with pytest.raises(Counterexample) as found:
        check(programs([*traces[:rank], changed, *traces[rank + 1 :]]))
    return str(found.value)


def numbers_of(events: list[Event], kind: str) -> list[int]:
    return [n for n, event in enumerate(events) if isinstance(event, Issue) and event.calls[0].kind == kind]


def with_call(event: Event, **changes: Any) -> Issue:
    assert isinstance(event, Issue)
    return event._replace(calls=(event.calls[0]._replace(**changes),))


def test_no_rank_can_hang(traces: list[Trace]) -> None:
    check(programs(traces))
    assert not any(trace.faults for trace in traces)
    kinds = {call.kind for event in traces[0].threads["main"] if isinstance(event, Issue) for call in event.calls}
    assert kinds >= {"new_group", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "send", "recv"}


@pytest.mark.parametrize("changes", [{"elements": 7}, {"dtype": "float64"}, {"detail": "MIN"}, {"kind": "barrier"}])
def test_another_operation_is_found(traces: list[Trace], changes: dict[str, Any]) -> None:
    def change(events: list[Event]) -> None:
        number = numbers_of(events, "all_reduce")[-2]
        events[number] = with_call(events[number], **changes)

    text = changed(traces, 5, change)
    assert "different operations" in text and "rank 5" in text and text.count("all_reduce") >= 1


def swap(events: list[Event]) -> None:
    """Two collectives of different groups."""
    pairs = itertools.pairwise(numbers_of(events, "all_reduce"))
    groups = (tuple(call.group for number in pair for call in with_call(events[number]).calls) for pair in pairs)
    pairs = itertools.pairwise(numbers_of(events, "all_reduce"))
    one, two = next(pair for pair, (first, second) in zip(pairs, groups, strict=True) if first != second)
    events[one], events[two] = events[two], events[one]


def skip(events: list[Event]) -> None:
    """The first reduction of a bucket, and the wait for it."""
    number = numbers_of(events, "reduce_scatter")[0]
    kept = [event for event in events if not (isinstance(event, Wait) and event.issue == number)]
    del kept[number]
    events[:] = [
        event._replace(issue=event.issue - 1) if isinstance(event, Wait) and event.issue > number else event
        for event in kept
    ]


def test_swapped_and_skipped_collectives_are_found(traces: list[Trace]) -> None:
    text = changed(traces, 1, swap)
    assert "wait for one another" in text and "rank 1 waits at " in text
    assert "rank 4" in changed(traces, 4, skip)


def test_groups_made_in_another_order_are_found(traces: list[Trace]) -> None:
    def change(events: list[Event]) -> None:
        one, two, *_ = numbers_of(events, "new_group")
        events[one], events[two] = events[two], events[one]

    text = changed(traces, 3, change)
    assert "new_group" in text and "rank 3" in text


def test_a_circle_of_sends_is_found() -> None:
    def stage(rank: int) -> Trace:
        calls = [Call(kind, 0, 8, "float32", 32, peer, "", "training", f"{kind}.py:1 {kind}")
                 for kind, peer in (("send", 1), ("recv", 2))]  # fmt: skip
        return Trace(rank, threads={"main": [Issue((call,), True) for call in calls]})

    def batched(rank: int) -> Trace:
        (first, second) = stage(rank).threads["main"]
        assert isinstance(first, Issue) and isinstance(second, Issue)
        return Trace(rank, threads={"main": [Issue((*first.calls, *second.calls), False), Wait(0, "here")]})

    check(programs([batched(rank) for rank in range(3)]))
    with pytest.raises(Counterexample, match="3 ranks wait for one another forever"):
        check(programs([stage(rank) for rank in range(3)]))


def test_a_collective_that_depends_on_the_data_is_found(traces: list[Trace], tmp_path: Path) -> None:
    (empty,) = extracted(tmp_path, [5], skip_of_empty_batches, empty=True)
    with pytest.raises(Counterexample, match=r"(?s)rank 5|rank 4"):
        check(programs([*traces[:5], empty, *traces[6:]]))


@pytest.mark.parametrize(
    "prepare, text",
    [(take_without_a_wait, "reads what recv of"), (use_a_bucket_again, "writes to what reduce_scatter")],
)
def test_buffers_that_are_used_too_early_are_found(tmp_path: Path, prepare: Any, text: str) -> None:
    (trace,) = extracted(tmp_path, [5], prepare)
    assert any(text in fault and ".py:" in fault for fault in trace.faults)


def test_a_rank_that_is_not_like_its_class_is_named(traces: list[Trace]) -> None:
    from megatron.tools.communication.verify import _difference

    other = replace(traces[4], rank=7)
    assert "rank 7 is not like rank 0" in (_difference(other, traces[0]) or "")
    assert _difference(traces[0], traces[2]) is None


LAYOUTS = {
    "an interleaved pipeline": ("pretrain_gpt2.py", 4, "--model-parallel-size 2 --pipe-parallel-size 2"
                                " --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --sequence-parallel"),
    "context and ZeRO 2": ("pretrain_gpt2.py", 4, "--context-parallel-size 2 --zero-stage 2"),
    "experts of more ranks than are run": ("pretrain_gpt2.py", 16, "--model-parallel-size 4 --pipe-parallel-size 2"
                                           " --num-experts 4 --expert-model-parallel-size 2"),
    "T5, split backward passes": ("pretrain_t5.py", 4, "--pipe-parallel-size 4 --decoder-seq-length 16"
                                  " --pipeline-schedule zbh1"),
}  # fmt: skip


def verify_layouts(folder: Path) -> dict[str, list[tuple[list[str], list[str]]]]:
    """Problems and phases of a fresh start of each of ``LAYOUTS``.

    Of more ranks than are run, also with empty batches and resumed; some are compared with those that stand for them,
    and the checkpoint lacks their files.
    """
    from megatron.tools.communication.request import EVERY_RANK
    from megatron.tools.communication.verify import verify

    words = " ".join(FLAGS[: FLAGS.index("--model-parallel-size")]).replace("--train-iters 2 ", "").split()
    found = {}
    for name, (file, world_size, flags) in LAYOUTS.items():
        program = PROGRAM.with_name(file)
        run, starts = make_starts([*words, *flags.split()], world_size, {"DS_ACCELERATOR": "cuda"}, program)
        some, sample = (starts[:3], 2) if world_size > EVERY_RANK else (starts[:1], 0)
        findings = verify(run, some, program, folder / str(len(found)), processes=2, sample=sample)
        found[name] = [(finding.problems, sorted(finding.phases)) for finding in findings]
    return found


def test_no_rank_can_hang_in_a_sample_of_layouts(tmp_path: Path) -> None:
    for name, starts in in_new_process(verify_layouts, tmp_path).items():
        assert not any(problems for problems, _ in starts), name
        assert all("training" in phases for _, phases in starts[::2]), name


def verify_in_turn(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Problems of the starts of two layouts."""
    from megatron.tools.communication.verify import verify_layouts
    from megatron.tools.verify.request import make_request, parse_layout

    words = [*FLAGS[: FLAGS.index("--batch-size")], *"--global-batch-size 4 --lr 1e-3 --bf16 --optimizer muon".split()]
    layouts = [parse_layout(name) for name in ("tp1-pp1-dp2-zero1", "tp2-pp0-dp1-zero1")]
    request = make_request(words, 6, layouts[0], {"DS_ACCELERATOR": "cuda"}, PROGRAM)
    return {
        layout.name: {finding.start: finding.problems for finding in findings}
        for layout, findings in verify_layouts(request, layouts, folder, processes=2)
    }


def test_a_layout_loads_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    starts: dict[str, list] = {"fresh start": [], "empty batches": [], "resumed": []}
    found = {"tp1-pp1-dp2-zero1": starts, "tp2-pp0-dp1-zero1": {**starts, "from tp1-pp1-dp2-zero1": []}}
    assert in_new_process(verify_in_turn, tmp_path) == found


@pytest.mark.parametrize(
    "flags",
    [
        "--train-iters 20 --save s --save-interval 3 --rewind-on-spike --spike-factor 3",
        "--train-iters 20 --auto-resume --save s --load-strict --keep-last 2 --async-save --override --no-save-optim",
        "--train-iters 20 --load s --skip-train",
        "--train-iters 20 --profile-dir p --profile-steps 2:3 --flops-profile-step 2 --trace t --trace-steps 2:3",
        "--train-iters 20 --wandb-project p --wandb-exp-name n --mlflow-experiment e",
        "--train-samples 64 --rampup-batch-size 4 2 8",
        "--train-samples 64 --step-batch-size-schedule 0:4,256:8",
    ],
)
def test_every_start_accepts_what_a_run_has(flags: str) -> None:
    """A setting of an output is left out with the flag that it needs."""
    words = FLAGS[: FLAGS.index("--batch-size")] + ["--batch-size", "1", "--lr", "1e-3", *flags.split()]
    words += ["--global-batch-size", "8"] if "step-batch-size" not in flags else []
    _, starts = make_starts(words, 2, {"DS_ACCELERATOR": "cuda"}, PROGRAM)
    for start in starts:
        environ = {"DS_ACCELERATOR": "cuda", "WORLD_SIZE": str(start.world_size)}
        assert read_run(start.arguments, environ, GPT2).problems == [], start.name


def test_offloaded_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="--offload-optimizer cpu is not supported"):
        make_starts([*FLAGS[:-4], "--offload-optimizer", "cpu"], 2, {"DS_ACCELERATOR": "cuda"}, PROGRAM)


FAULTY = """
import os, runpy
import torch.distributed as dist
from pretrain_gpt2 import ARCHITECTURE

all_reduce = dist.all_reduce

def all_reduce_of_this_rank(tensor, op=dist.ReduceOp.SUM, **options):
    is_wrong = os.environ["RANK"] == "1" and op == dist.ReduceOp.MAX and tensor.shape == (64,)
    return all_reduce(tensor, dist.ReduceOp.SUM if is_wrong else op, **options)

if __name__ == "__main__":
    dist.all_reduce = all_reduce_of_this_rank
    runpy.run_path("PROGRAM", run_name="__main__")
"""


def test_a_program_with_a_fault_ends_the_tool(programs: Programs, tmp_path: Path) -> None:
    """The largest logits are summed on one rank; nothing else keeps two ranks from training and loading."""
    (tmp_path / "faulty.py").write_text(FAULTY.replace("PROGRAM", str(PROGRAM)))
    words = [*FLAGS[: FLAGS.index("--model-parallel-size")], "--model-parallel-size", "2", "--num-layers", "1"]
    tool = "tools/verify_communication.py", "--world-size", "2"
    ended = programs.warm(1, *tool, "--program", tmp_path / "faulty.py", *words)
    assert ended.returncode == 6, ended.output
    found = "call different operations as number [0-9]+ of their group of ranks 0, 1, in training:"
    assert re.search(f"error: fresh start: ranks (0 and 1|1 and 0) {found}", ended.output), ended.output
    assert re.search(r"rank 0: all_reduce of 64 float32 \(MAX\) at .*/faulty.py:[0-9]+", ended.output)
    assert re.search(r"rank 1: all_reduce of 64 float32 \(SUM\) at .*/faulty.py:[0-9]+", ended.output)
    assert "no rank can hang" not in ended.output
