"""One rank of a larger run, alone: what it believes to receive is what another rank would send."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.ranks import fork_server

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data"
    " --vocab-size 512 --batch-size 2 --gas 2 --train-iters 2 --eval-iters 0 --num-workers 0 --lr 1e-3"
).split()


def run_rank(world_size: int, number: int, program: str, words: list[str], result: str) -> None:
    """Run the program; the exit code, and the messages of shapes that it has sent and believed to receive, as JSON."""
    from megatron.engines import transfers
    from megatron.tools.one_rank import run
    from megatron.tools.one_rank.group import OneRankGroup, Operation

    class Rows:
        sent: list[list[int]] = []

        def issued(self, operation: Operation) -> None:
            rows = [x for x in operation.read if operation.kind == "send" and x.shape == (transfers._ROW,)]
            self.sent += [row.tolist() for row in rows if row.dtype.is_signed]

        def waited(self, issued: Any) -> None: ...

        def grouped(self, ranks: Any, group: Any) -> None: ...

    answered: list[list[int]] = []
    transferred_value = run.transferred_value

    def noted(*arguments: Any) -> Any:
        value = transferred_value(*arguments)
        answered.append(transfers._shape_row(value))
        return value

    run.transferred_value = noted
    OneRankGroup.observer = Rows()
    with run.one_rank(world_size, number):
        code = run.run_program(ROOT / program, words)
    Path(result).write_text(json.dumps([code, Rows.sent, answered]))
    os._exit(0)


@pytest.mark.parametrize(
    "program, stages, flags",
    [
        ("pretrain_gpt2.py", 2, "--model-parallel-size 2 --sequence-parallel --bf16 --context-parallel-size 2"),
        ("pretrain_bert.py", 2, "--model-parallel-size 2"),
        ("pretrain_t5.py", 4, "--decoder-seq-length 16"),
    ],
)
def test_a_stage_receives_the_shapes_that_its_neighbor_sends(
    tmp_path: Path, program: str, stages: int, flags: str
) -> None:
    words = [*MODEL, *flags.split(), "--pipe-parallel-size", str(stages), "--zero-stage", "1"]
    found = []
    processes = []
    for stage in range(stages):
        arguments = (4 * stages, 4 * stage + 1, program, words, str(tmp_path / str(stage)))
        processes.append(fork_server().Process(target=run_rank, args=arguments))
        processes[-1].start()
    for stage, process in enumerate(processes):
        process.join()
        found.append(json.loads((tmp_path / str(stage)).read_text()))
    assert [code for code, _, _ in found] == [0] * stages
    sent = [row for _, rows, _ in found for row in rows]
    believed = [row for _, _, rows in found for row in rows]
    assert len(sent) == 2 * (stages - 1) and sorted(sent) == sorted(believed)
