"""Write docs/layouts.md: what may be combined with what, as the rules in megatron/config/validation state."""

from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.config.command_line.parser import read_flags
from megatron.config.command_line.resolve import resolve_run
from megatron.config.validation import RULES
from megatron.tools.command_line import ToolParser, run_tool

PAGE = Path(__file__).resolve().parent.parent / "docs" / "layouts.md"

INTRODUCTION = """\
# Which layouts are legal

This page is made from the rules themselves: `python tools/write_layout_docs.py` writes it. What breaks a rule is
refused before anything starts, with a message that names the nearest legal settings; all broken rules come at once.
`--explain` on any command line prints layout, groups of ranks, DeepSpeed config and what each rule finds, and starts
nothing; `--world-size N` with it stands for the launcher. Whether legal layouts compute the same on your own model,
[tools/verify_layout.py](verify.md) shows.

## At a glance

Each row is a setting, each column an engine with what goes with it: tensor parallelism (TP), `--sequence-parallel`
(SP), `--ds-sequence-parallel-size` (Ulysses). A number is that of the rule, further down, that is against it.
"""

RULES_INTRODUCTION = """
## The rules

| | what must hold | because | DeepSpeed would otherwise |
|---|---|---|---|
"""

SAMPLE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --lr 0.001 --train-iters 10 "
    "--batch-size 1 --gas 8 --data-path corpus --vocab-file vocab.json --merge-file merges.txt"
)
ENGINES = {
    "plain engine": "--pipe-parallel-size 0",
    "plain, TP": "--pipe-parallel-size 0 --model-parallel-size 2",
    "plain, TP, SP": "--pipe-parallel-size 0 --model-parallel-size 2 --sequence-parallel",
    "plain, Ulysses": "--pipe-parallel-size 0 --ds-sequence-parallel-size 2",
    "pipeline": "--pipe-parallel-size 2",
    "pipeline, TP": "--pipe-parallel-size 2 --model-parallel-size 2",
    "pipeline, TP, SP": "--pipe-parallel-size 2 --model-parallel-size 2 --sequence-parallel",
    "DualPipeV, TP": "--pipe-parallel-size 2 --model-parallel-size 2 --pipeline-schedule dualpipev",
}
SETTINGS = {
    **{f"fp32, ZeRO {stage}": f"--zero-stage {stage}" for stage in range(4)},
    **{f"bf16, ZeRO {stage}": f"--bf16 --zero-stage {stage}" for stage in range(4)},
    **{f"fp16, ZeRO {stage} (GPU)": f"--fp16 --zero-stage {stage}" for stage in range(4)},
    "fp16 on the CPU": "cpu --fp16 --zero-stage 1",
    **{
        f"bf16, gradients summed in fp32, ZeRO {stage}": f"--bf16 --grad-accum-dtype fp32 --zero-stage {stage}"
        for stage in range(4)
    },
    **{
        f"optimizer on {device}, ZeRO {stage}": f"--offload-optimizer {device} --zero-stage {stage} {folder}"
        for device, folder in (("cpu", ""), ("nvme", "--nvme-path folder"))
        for stage in range(4)
    },
    **{f"weights on cpu, ZeRO {stage}": f"--offload-param cpu --zero-stage {stage}" for stage in range(1, 4)},
    **{f"overlapped reduction, ZeRO {stage}": f"--zero-overlap-comm --zero-stage {stage}" for stage in range(4)},
    **{
        f"round-robin gradients, ZeRO {stage}": f"--zero-round-robin-gradients --zero-stage {stage}"
        for stage in range(4)
    },
    "recomputed layers": "--checkpoint-activations",
    "recomputed attention core": "--recompute-granularity selective",
    "partitioned activations": "--checkpoint-activations --partition-activations",
    "activations in one buffer": "--checkpoint-activations --contiguous-checkpointing",
    "partitioned activations in one buffer": (
        "--checkpoint-activations --partition-activations --contiguous-checkpointing"
    ),
    "activations in CPU memory": "--checkpoint-activations --checkpoint-in-cpu",
    "partitioned activations in CPU memory": "--checkpoint-activations --partition-activations --checkpoint-in-cpu",
    "documents apart": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "hidden states [s, b, h]": "--shape-order SBH",
}


def main() -> None:
    """Read the flag, write the page."""
    parser = ToolParser(__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="page to write")
    args = parser.parse_args()
    with atomic_file(args.output, "--output") as file:
        file.write(page())


def page() -> str:
    """The whole page."""
    return INTRODUCTION + at_a_glance() + RULES_INTRODUCTION + "".join(rules())


def at_a_glance() -> str:
    """A row for each setting, a column for each engine."""
    lines = [f"\n| | {' | '.join(ENGINES)} |\n", "|---" * (len(ENGINES) + 1) + "|\n"]
    for name, words in SETTINGS.items():
        cells = [", ".join(map(str, against(f"{words} {engine}"))) or "yes" for engine in ENGINES.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    return "".join(lines)


def against(words: str) -> list[int]:
    """The numbers of the rules that a run of SAMPLE and ``words`` breaks, on GPUs unless they begin with cpu."""
    device = "cpu" if words.startswith("cpu ") else "cuda"
    given, problems = read_flags([*SAMPLE.split(), *words.removeprefix("cpu ").split()])
    assert not problems, problems
    run, unsettled = resolve_run(given, {"DS_ACCELERATOR": device, "WORLD_SIZE": "8"})
    assert not unsettled, unsettled
    return [number for number, rule in enumerate(RULES, start=1) if rule.check(run) is not None]


def rules() -> list[str]:
    """A row for each rule."""
    return [f"| {number} | {rule.name} | {rule.why} | {rule.otherwise} |\n" for number, rule in enumerate(RULES, 1)]


if __name__ == "__main__":
    run_tool(main)
