"""--explain: the whole configuration of a run is printed, and nothing starts."""

import json
from collections.abc import Sequence

import pytest
from deepspeed.runtime.pipe.topology import ProcessTopology
from support.command_lines import CPU, CUDA, parse, read
from support.programs import TINY_MODEL, Programs

from megatron.cli.validation import RULES
from megatron.common.errors import UserError
from megatron.config import ParallelConfig
from megatron.parallel import groups
from megatron.tools.planning.explain import explain
from megatron.training.summary import describe_config

SIZES = "--batch-size 2 --gas 4 --train-iters 10 --explain".split()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 1, 2), (4, 3, 1, 2), (0, 2, 2, 2), (2, 4, 1, 1)])
def test_groups_are_those_of_deepspeeds_grid(sizes: Sequence[int]) -> None:
    pipe, data, sequence, tensor = sizes
    topology = ProcessTopology(axes=["pipe", "data", "sequence", "tensor"], dims=[max(pipe, 1), *sizes[1:]])
    parallel = ParallelConfig(
        world_size=topology.world_size(),
        pipe_parallel_size=pipe,
        ds_sequence_parallel_size=sequence,
        model_parallel_size=tensor,
    )
    for axis, found in groups(parallel).items():
        expected = topology.get_axis_comm_lists(axis)  # none where the axis has one place only
        assert sorted(found) == sorted(expected or [[rank] for rank in range(topology.world_size())])
    assert parallel.data_parallel_size == data


def test_a_legal_run_is_explained_without_torch(programs: Programs) -> None:
    words = "--world-size 16 --model-parallel-size 2 --pipe-parallel-size 4 --zero-stage 1".split()
    without_torch = (
        "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path('pretrain_gpt2.py', {}, '__main__')"
    )
    words = [*TINY_MODEL, *programs.data_arguments, *SIZES, *words]
    finished = programs.python("-c", without_torch, *words, "--verbose").ok()
    for line in (
        "> layout    16 processes = TP 2 x PP 4 x DP 2, pipeline engine, 4 stages, ZeRO 1",
        "> tensor    8 groups of 2: [0 1] [2 3] [4 5] [6 7] [8 9] [10 11] [12 13] [14 15]",
        "> data      8 groups of 2: [0 2] [1 3]",
        "> pipe      4 groups of 4: [0 4 8 12] [1 5 9 13] [2 6 10 14] [3 7 11 15]",
        '"train_batch_size": 16',
        "kept    The pipeline runs at ZeRO 0 or 1",
        f"{len(RULES)} rules, all kept",
        "stage  holds ",
        "> attention plain (fp32, ",
    ):
        assert line in finished.output
    assert "BROKEN" not in finished.output
    config, _ = json.JSONDecoder().raw_decode(finished.output.partition("> deepspeed ")[2])
    assert config["train_batch_size"] == 16 and config["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("environ", "words", "line"),
    [
        (CPU, "", "plain (fp32, head dim 16, causal): torch's fused kernel for CPUs has no dropout"),
        (CPU, "--attention-dropout 0", "flash (fp32, head dim 16, causal)"),
        (CUDA, "", "memory-efficient (fp32, head dim 16, causal): fp32 has no flash kernel on CUDA"),
        (
            CUDA,
            "--bf16 --reset-attention-mask --attention-dropout 0 --seq-length 64 --pre-tokens 9",
            "flash (bf16, head dim 16, causal, separate documents, window of 9 tokens, by varlen): on compute"
            " capability 8.0 or later",
        ),
    ],
)
def test_the_kernel_of_attention_is_named(environ, words: str, line: str) -> None:
    assert describe_config(parse(words, environ=environ))["attention"] == line


SCHEDULES = {
    "1f1b": ["F1 F2 .  .  B1    F3 B2    F4 B3    .  B4", ".  F1 B1    F2 B2    F3 B3    F4 B4    ."],
    "zbh1": ["F1 F2 .  I1 W1 F3 I2 W2 F4 I3 W3 I4 W4", ".  F1 I1 F2 I2 W1 F3 I3 W2 F4 I4 W3 W4"],
    "interleaved --num-virtual-stages-per-pipeline-rank 2": [
        "F1a F2a F1b F2b F3a .   B1b     F4a B2b     F3b B1a     F4b B2a     .   B3b     .   B4b     B3a     B4a",
        ".   F1a F2a F1b B1b     F2b B2b     F3a B1a     F4a B2a     F3b B3b     F4b B4b     B3a     B4a     .",
    ],
}
"""Four micro-batches on two stages. B takes as long as I and W together, and each of the three parts equally long."""


@pytest.mark.parametrize("words", SCHEDULES)
def test_the_schedule_is_drawn(capsys: pytest.CaptureFixture, words: str) -> None:
    with pytest.raises(UserError):  # after the explanation: the files are missing
        explain(read(f"--pipe-parallel-size 2 --gas 4 --pipeline-schedule {words}", ranks=2))
    lines = capsys.readouterr().out.splitlines()
    title = f"> schedule  {words.split()[0]}, 4 micro-batches: "
    begin = next(number for number, line in enumerate(lines) if line.startswith(title))
    assert lines[begin + 1 : begin + 3] == [f">   stage {n} {row}" for n, row in enumerate(SCHEDULES[words])]


def test_an_illegal_run_names_rule_cause_and_remedy(programs: Programs) -> None:
    words = "--world-size 4 --pipe-parallel-size 2 --zero-stage 3".split()
    finished = programs.python("pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, *SIZES, *words)
    assert finished.returncode == 2
    for line in (
        "BROKEN  The pipeline runs at ZeRO 0 or 1",
        "found: --zero-stage 3 cannot be combined with --pipe-parallel-size 2",
        "use --zero-stage 1 or --pipe-parallel-size 0",
        "DeepSpeed otherwise: AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        "pretrain_gpt2.py: error: --zero-stage 3",
    ):
        assert line in finished.output
    assert finished.output.count("BROKEN") == 1 and "kept    " not in finished.output
    assert finished.output.startswith("BROKEN  "), "the broken rule is at the top"
    assert f"{len(RULES)} rules, 1 broken, 0 warnings, {len(RULES) - 1} kept; --verbose lists" in finished.output


def test_layouts_are_explained_by_their_tool(programs: Programs) -> None:
    finished = programs.python(
        "tools/verify_layout.py", "--layouts", "tp1-pp0-dp1", "tp2-pp2-dp1-zero2", *TINY_MODEL,
        *programs.data_arguments, *SIZES,
    )  # fmt: skip
    assert finished.returncode == 2
    assert "tp1-pp0-dp1" in finished.output and f"{len(RULES)} rules, all kept" in finished.output
    assert "BROKEN  The pipeline runs at ZeRO 0 or 1" in finished.output
