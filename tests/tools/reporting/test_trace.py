"""The timeline of a run is what theory says the run does, and serves to cut the model better."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.command_lines import parse
from support.programs import read_metrics
from support.timelines import instructions
from support.training import RankTraining, pretrain

from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.pipeline.schedule import Instruction, Schedule
from megatron.tools.reporting.files import read_timeline
from megatron.tools.reporting.timeline import Timeline, measure
from megatron.tools.reporting.tracing import Profiler, machine, seconds_ahead

SETTINGS = (
    "--train-iters 4 --batch-size 1 --eval-iters 1 --eval-interval 1 --hidden-dropout 0 --attention-dropout 0 "
    "--trace-steps 2:3"
).split()
SECONDS = (0.02, 0.02, 0.02, 0.1)
"""What each layer takes beyond what it computes."""


def pretrain_slowly(words: list[str]) -> tuple[int, str]:
    """A run whose layers take so much longer."""
    real = ParallelTransformerLayer.__init__

    def init(layer: ParallelTransformerLayer, *arguments: Any, layer_number: int) -> None:
        real(layer, *arguments, layer_number=layer_number)
        layer.register_forward_hook(lambda *_: time.sleep(SECONDS[layer_number - 1]))

    ParallelTransformerLayer.__init__ = init
    return pretrain(words)


@pytest.fixture(scope="module")
def slow_run(_rank_pools, programs, tmp_path_factory) -> tuple[RankTraining, Path]:
    """How to train slowly, and the folder of such a run on two stages."""
    train, folder = (
        RankTraining(_rank_pools.run_once, programs.data_arguments, pretrain_slowly),
        tmp_path_factory.mktemp("slow"),
    )
    train(2, *SETTINGS, "--gas", 3, "--pipe-parallel-size", 2, "--trace", folder, "--run-dir", folder)
    return train, folder


def test_trace_of_two_stages_follows_the_schedule(slow_run: tuple[RankTraining, Path]) -> None:
    _assert_theory(read_timeline(slow_run[1]), stages=2, micro_batches=3)


def _assert_theory(timeline: Timeline, stages: int, micro_batches: int) -> None:
    assert timeline.iterations == [2, 3]
    for rank, iteration in itertools.product(range(stages), timeline.iterations):
        events = _in_order(timeline, rank, iteration)
        assert [_instruction(event) for event in events] == instructions(rank, stages, micro_batches)
        assert all(before.end <= after.begin for before, after in itertools.pairwise(events))
        for sent, other in (("SendActivation", rank + 1), ("SendGrad", rank - 1)):
            for event in events:
                if event.name == sent:
                    received = sent.replace("Send", "Recv"), event.micro_batch
                    (end,) = (e.end for e in _in_order(timeline, other, iteration) if received == e[:1] + e[4:5])
                    assert event.begin < end, "the clocks of two ranks are one"


def _in_order(timeline: Timeline, rank: int, iteration: int) -> list:
    return sorted(timeline.instructions(rank, iteration), key=lambda event: event.begin)


def _instruction(event: Any) -> Instruction:
    return Instruction(event.name, event.micro_batch, event.phase)


def test_slow_layer_has_its_own_stage(slow_run: tuple[RankTraining, Path], tmp_path: Path) -> None:
    """And the losses are what they were."""
    train, folder = slow_run
    words = ("--gas", 3, "--pipe-parallel-size", 2, "--trace", tmp_path, "--metrics-file", tmp_path / "metrics")
    output = train(2, *SETTINGS, *words, "--repartition-from", folder)
    assert "embeddings, layers 1-3 " in output and "layer 4, head " in output
    measured = [read_timeline(place) for place in (folder, tmp_path)]
    assert measure(measured[1]).imbalance < measure(measured[0]).imbalance
    losses = [[line["lm_loss"] for line in read_metrics(path) if "lm_loss" in line]
              for path in (folder / "metrics.jsonl", tmp_path / "metrics")]  # fmt: skip
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_layer_is_timed_forward_and_backward(slow_run: tuple[RankTraining, Path]) -> None:
    timeline = read_timeline(slow_run[1])
    for layer, seconds in enumerate(SECONDS, start=1):
        events = [event for event in timeline.events[(layer - 1) // 2] if event.layer == layer]
        assert sorted(event.name for event in events) == ["BackwardPass"] * 6 + ["ForwardPass"] * 6
        assert all(event.seconds >= seconds for event in events if event.name == "ForwardPass")
        for event in events:
            (whole,) = (
                e for e in timeline.instructions((layer - 1) // 2, event.iteration)
                if (e.name, e.micro_batch) == (event.name, event.micro_batch)
            )  # fmt: skip
            assert whole.begin <= event.begin <= event.end <= whole.end
    costs = json.loads((slow_run[1] / "trace.json").read_text())["otherData"]["unit_seconds"]
    assert len(costs) == 6 and costs[4] == max(costs)


def test_the_plain_engine_with_tensor_parallelism_and_recomputation(train_in_ranks, tmp_path: Path) -> None:
    words = ("--gas", 2, "--model-parallel-size", 2, "--checkpoint-activations", "--trace", tmp_path)
    train_in_ranks(2, *SETTINGS, *words)
    timeline = read_timeline(tmp_path)
    done = [(event.name, event.micro_batch) for event in _in_order(timeline, 1, 2)]
    names = ("LoadMicroBatch", "ForwardPass", "BackwardPass", "ReduceGrads", "OptimizerStep")
    assert done == [(name, None if name == "ReduceGrads" else number) for number in (1, 2) for name in names]
    of_layer = [event for event in timeline.events[1] if event.layer == 3 and event[3:5] == (2, 1)]
    assert [event.name for event in of_layer] == ["ForwardPass", "BackwardPass", "BackwardPass"], "forward again"
    collectives = [event.name for event in timeline.events[1] if event.collective == "all_reduce"]
    assert collectives.count("ForwardPass") >= 2 * 2 * 8, "two to a layer, in two micro-batches of two iterations"
    assert all(rank["collectives"] > 0 for rank in measure(timeline).ranks)


def test_trace_of_a_divided_backward_pass(train_in_ranks, tmp_path: Path) -> None:
    words = ("--gas", 4, "--pipe-parallel-size", 2, "--pipeline-schedule", "zbv", "--trace", tmp_path)
    train_in_ranks(2, *SETTINGS, *words)
    timeline = read_timeline(tmp_path)
    names = {"F": "ForwardPass", "I": "BackwardInputPass", "W": "BackwardWeightPass"}
    schedule = Schedule("zbv", 2, 4, 2)
    for rank in (0, 1):
        passes = [_instruction(e) for e in _in_order(timeline, rank, 3) if e.kind in ("forward", "backward", "weights")]
        own = schedule.chunks_of(rank)
        assert passes == [
            Instruction(names[kind], number + 1, own.index(chunk)) for chunk, kind, number in schedule.actions(rank)
        ]
    assert timeline.schedule == schedule
    picture = (tmp_path / "schedule.svg").read_text()
    for words in ("forward", "input gradients", "weight gradients", "receive and wait"):
        assert f">{words}</text>" in picture


def differences() -> tuple[float, float]:
    """On machines whose clocks are a thousand seconds apart, and on this one."""
    rank = dist.get_rank()
    apart = seconds_ahead(lambda: time.perf_counter() + 1000 * rank, f"machine {rank}")
    return apart, seconds_ahead(time.perf_counter, machine())


def test_clock_offsets_are_estimated(run_ranks) -> None:
    (first, same), (second, also_same) = run_ranks(2, differences)
    assert (first, same, also_same) == (0, 0, 0)
    assert abs(second - 1000) < 10


def test_both_profilers_beside_a_trace(train_in_ranks, tmp_path: Path) -> None:
    settings = "--train-iters 4 --batch-size 1 --gas 2 --eval-iters 0 --trace-steps 4:9"
    looks = "--profile-steps 2:3 --flops-profile-step 2"
    output = train_in_ranks(1, *settings.split(), *looks.split(), "--trace", tmp_path)
    assert f"  wrote the trace to {tmp_path}: trace.json, schedule.svg" in output.splitlines()
    assert f"  wrote the profile to {tmp_path}: profile-rank*.txt and .json" in output.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {
        "flops-profile.txt", "profile-rank0.json", "profile-rank0.txt", "schedule.svg", "trace.json"
    }  # fmt: skip
    names = [event["name"] for event in json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]]
    assert [names.count(f"iteration {n}") for n in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert names.count("ForwardPass of micro-batch 2") == 2 and "aten::addmm" in names
    assert "Self CPU %" in (tmp_path / "profile-rank0.txt").read_text()
    counted = (tmp_path / "flops-profile.txt").read_text()
    assert "Profile Summary at step 2:" in counted and "ParallelTransformerLayer" in counted
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["iteration"] for event in trace if event["ph"] == "X"} == {4}, "the run ends before 9"


def test_a_profile_that_torch_did_not_write_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On a full disk torch logs it, and leaves the half of a file."""
    run = parse(f"--train-iters 4 --profile-dir {tmp_path} --profile-steps 1:1")
    callback = Profiler(run, 0)
    with callback.around_iteration(1):
        assert callback._profile is not None
        callback._profile.export_chrome_trace = lambda path: Path(f"{path}.tmp").write_text("{")
    assert capsys.readouterr().out == (
        f"  warning: the profile cannot be written ({tmp_path}/profile-rank0.json: "
        "torch did not write it); continuing without\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["profile-rank0.txt"]
